"""Messages between two ends of a line; each end is as in a process of its own."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from multiprocessing import Pipe

import pytest
import torch

from autopar.runtime.launch.ipc import Message, WorkerChannel, find_unpicklable, limit_waits
from autopar.runtime.launch.shared_memory import SharedMemory, shared_file


@pytest.fixture
def ends() -> Iterator[tuple[WorkerChannel, WorkerChannel]]:
    ours, theirs = Pipe()
    there, back = shared_file(), shared_file()
    caller = WorkerChannel(ours, SharedMemory(there), SharedMemory(back))
    worker = WorkerChannel(theirs, SharedMemory(os.dup(back)), SharedMemory(os.dup(there)))
    yield caller, worker
    caller.close()
    worker.close()


def moved(ends: tuple[WorkerChannel, WorkerChannel], message: object, lend: bool = False) -> object:
    caller, worker = ends
    caller.send(caller.encode(message, lend))
    return worker.decode(worker.receive())


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_arrive_as_they_were(ends, dtype):
    x = torch.arange(24).reshape(2, 3, 4).to(dtype)
    sent = {"plain": x, "strided": x.transpose(0, 2), "slice": x[1:], "number": x[0, 0, 1], "none": x[:0]}
    for lend in (False, True):
        got = moved(ends, sent, lend)
        assert isinstance(got, dict) and got.keys() == sent.keys()
        for name, tensor in sent.items():
            assert got[name].dtype == dtype and torch.equal(got[name], tensor), name


def test_only_a_slice_travels_and_each_tensor_once(ends):
    x = torch.zeros(1000, 64)
    slots = ends[0].encode([x[:2], x[:2], x[2:3]]).slots
    assert [slot.num_bytes for slot in slots] == [512, 512, 256]
    part = x[:2].requires_grad_()
    got = moved(ends, [part, {"again": part}])
    assert isinstance(got, list)
    assert got[0] is got[1]["again"] and not got[0].requires_grad


def test_memory_is_given_back_unless_it_is_lent(ends):
    caller, worker = ends

    def size() -> int:
        return os.fstat(caller.sending.fd).st_size

    kept = moved(ends, torch.ones(1000))
    assert size() == 0
    lent = moved(ends, torch.full((1000,), 2.0), lend=True)
    assert isinstance(kept, torch.Tensor) and isinstance(lent, torch.Tensor)
    assert size() >= 4000 and lent[0] == 2
    moved(ends, "nothing to carry")
    assert size() >= 4000
    again = moved(ends, torch.full((500,), 3.0), lend=True)  # in the same memory
    assert isinstance(again, torch.Tensor)
    assert lent[0] == 3 and lent.data_ptr() == again.data_ptr()
    assert torch.equal(kept, torch.ones(1000))
    worker.send(worker.encode((True, torch.full((7,), 4.0))))
    assert caller.decode(caller.receive())[1].tolist() == [4.0] * 7


def test_it_grows_again(ends):
    for size in (10, 100_000, 10, 200_000):
        for lend in (True, False):
            got = moved(ends, torch.arange(size), lend)
            assert isinstance(got, torch.Tensor) and torch.equal(got, torch.arange(size))


@pytest.mark.parametrize("tensor", [torch.empty(2, device="meta"), torch.eye(2).to_sparse()], ids=["meta", "sparse"])
def test_what_has_no_bytes_is_refused_and_named(ends, tensor):
    with pytest.raises(pickle.PicklingError, match="tensor of layout"):
        ends[0].encode({"x": [tensor]})
    assert find_unpicklable({"x": [1, tensor]}, "arguments") == "arguments['x'][1], a Tensor"


def test_a_process_that_reads_nothing_is_not_waited_for_without_end(ends):
    limit_waits(ends[0].connection, 1.0)
    with pytest.raises(BlockingIOError):
        ends[0].send(Message(bytes(10_000_000), [], False))
