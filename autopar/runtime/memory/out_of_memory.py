"""Error for a rank whose device ran out of memory."""

from __future__ import annotations

import psutil
import torch

from autopar.errors import DeviceMemoryError
from autopar.ir.units import BYTES, text
from autopar.runtime.rank import Rank
from autopar.runtime.spec import rank_text


def lack_of_memory(error: BaseException) -> torch.OutOfMemoryError | None:
    """Out-of-memory error among an error and its causes; None if there is none.

    The context of an error counts only if the error is of torch's compiler, which raises its own while it handles one:
    inductor where a region is compiled, torch.compile in a loss function. Other code that raises while it handles an
    out-of-memory error has failed for another reason.
    """
    seen = set[int]()
    candidate: BaseException | None = error
    while candidate is not None and id(candidate) not in seen:
        if isinstance(candidate, torch.OutOfMemoryError):
            return candidate
        seen.add(id(candidate))
        of_compiler = type(candidate).__module__.startswith(("torch._dynamo.", "torch._inductor."))
        candidate = candidate.__cause__ or (candidate.__context__ if of_compiler else None)
    return None


def out_of_memory(rank: Rank, command: str, error: torch.OutOfMemoryError) -> DeviceMemoryError:
    """Error with the rank, its part of the model, its peak and the predicted bytes.

    The peak is the process's peak so far; on a GPU, the bytes that the allocator had handed out before the request
    that failed.
    """
    spec, device = rank.spec, rank.device
    action = rank.current_step.current_action if rank.current_step is not None else None
    on_gpu = device.type == "cuda"
    capacity = torch.cuda.get_device_properties(device).total_memory if on_gpu else psutil.virtual_memory().total
    remedies = ["more microbatches", 'recompute="all"', "more devices"]
    if spec.mesh.dp > 1 and not spec.owners:
        remedies.insert(2, "zero=1")
    reason = str(error).splitlines()[0].removesuffix(".") if str(error) else type(error).__name__
    where = f" in action {action}" if action is not None else ""
    peak, predicted = text(rank.peak_bytes(), BYTES), text(spec.predicted_bytes, BYTES)
    return DeviceMemoryError(
        f"{rank_text(spec.mesh, spec.rank, spec.placement).capitalize()} ran out of memory during {command}{where}, "
        f"with {spec.region} on {device}: {reason}. Its peak was {peak} of {text(capacity, BYTES)}; the plan predicted "
        f"{predicted}. Use {', '.join(remedies[:-1])} or {remedies[-1]}; or pass memory= with less than {predicted}, "
        "so that the planner looks for a smaller plan."
    )
