"""Every rule, every letter: an operation run in parts equals the whole one, forward and backward."""

from __future__ import annotations

import functools
import inspect
from dataclasses import replace

import pytest
from support.rule_cases import Case, all_cases, case, fixed, x
from support.rule_oracle import Example, check, example

from autopar.ir.layout import REPLICATED
from autopar.sharding.bound_call import BoundCall, RuleFunction, make_rule
from autopar.sharding.functions import pixels, shapes
from autopar.sharding.functions import products as algebra
from autopar.sharding.functions import views as parts
from autopar.sharding.functions.views import reduced
from autopar.sharding.lookup import key_of, rule_of
from autopar.sharding.parse import bind
from autopar.sharding.reshard import COLLECTIVES
from autopar.sharding.rule import Rule, strategies, strategy
from autopar.sharding.table import RULES

CASES = list(all_cases())
OUTERS = (2, 3)
RAGGED = 3  # ranks that do not divide most sizes, so that parts differ
UNSPLIT = {key for key, entry in RULES.items() if entry in (shapes.replicated, shapes.random)}


@functools.cache
def example_of(number: int) -> Example:
    """The example of a case."""
    return example(CASES[number])


def rule_for(this: Example) -> Rule:
    rule = rule_of(this.op, this.shape_of)
    assert rule is not None, f"{this.op.target} of {[this.shape_of(name) for name in this.op.reads]} has no rule"
    return rule


def labels(this: Example, ranks: int) -> list[str]:
    """All strategies of an example, splits in several parts included."""
    rule = rule_for(this)
    ragged = rule.free if ranks == RAGGED else ()
    return [found.label for found in strategies(rule, ranks, dict.fromkeys(rule.free, OUTERS), ragged)]


def runs(this: Example) -> list[tuple[str, int]]:
    """Strategies and numbers of ranks."""
    return [(label, ranks) for ranks in (2, 4, RAGGED) for label in labels(this, ranks)]


TITLES = [f"{case.target.removeprefix('aten.')}-{i}" for i, case in enumerate(CASES)]


@pytest.mark.parametrize("number", range(len(CASES)), ids=TITLES)
def test_parts_equal_the_whole(number: int) -> None:
    this = example_of(number)
    rule = rule_for(this)
    assert runs(this)
    for label, ranks in runs(this):
        found = strategy(rule, label, ranks)
        assert found is not None
        try:
            check(this, rule, found, ranks)
        except Exception as error:
            error.add_note(f"over {ranks} ranks, split by {label or 'nothing'}")
            raise


def test_examples_cover_the_table() -> None:
    every = [example_of(number) for number in range(len(CASES))]
    split = {(key_of(this.op.target), ranks) for this in every for label, ranks in runs(this) if label}
    whole = {key_of(this.op.target) for this in every}
    alone = RULES.keys() - {f"autopar.{name}" for name in COLLECTIVES}  # test_tensor_axes.py has these
    assert whole == alone
    assert {key for key in alone if (key, 2) not in split or (key, 4) not in split} == UNSPLIT


def test_every_rule_function_is_in_the_table() -> None:
    functions = {
        function
        for module in (shapes, parts, algebra, pixels)
        for _, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__ and inspect.get_annotations(function).get("return") == "Rule | None"
    }
    assert functions <= set(RULES.values())


# -- the judge itself ------------------------------------------------------------------------------------------------


def text(rule: str) -> RuleFunction:
    return lambda call: bind(rule, call)


def contiguous_heads(call: BoundCall) -> Rule | None:
    """The fused query, key and value split as if its heads were outermost."""
    sizes = {"q": 3, "h": 4, "d": 2}
    return make_rule(call, [(("b",), ("h", "q", "d"))], [(("b",), ("q",), ("h",), ("d",))], sizes=sizes)


def contiguous_channels(call: BoundCall) -> Rule | None:
    """A grouped convolution's channels split as if they were one group's."""
    dims = (("n",), ("i", "g"), (), ()), (("o", "g"), ("i",), (), ()), (("o", "g"),)
    return make_rule(call, dims, [(("n",), ("o", "g"), (), ())], sizes={"g": 4, "i": 2, "o": 4}, summed="i", added=[2])


def contiguous_joint(call: BoundCall) -> Rule | None:
    """A concatenation split as if its operands were interleaved."""
    each = (("n",), ("r",))
    return make_rule(call, [each, each], [(("n",), ("r", "p"))], sizes={"p": 2, "r": 4}, whole="p")


ATTENTION = case("scaled_dot_product_attention.default", x(2, 4, 8, 4), x(2, 4, 8, 4), x(2, 4, 8, 4))
CAUSAL = case("scaled_dot_product_attention.default", *ATTENTION.args, None, 0.0, True)
STATISTICS = case("batch_norm.default", x(8, 4), x(4), x(4), fixed(4), fixed(4), True, 0.1, 1e-5, True)
IMAGE = case("conv2d.default", x(2, 8, 4, 4), x(16, 2, 3, 3), x(16), (1, 1), (1, 1), (1, 1), 4)

# A call, a wrong rule for it, and a letter that shows it.
PLANTED: dict[str, tuple[Case, RuleFunction, str]] = {
    "a normalised group in parts": (case("group_norm.default", x(2, 8, 4), 4), text("n c p! -> n c p!"), "c"),
    "softmax over a split dim": (case("softmax.int", x(4, 8), 1), text("n c -> n c"), "c"),
    "batch norm over split samples": (STATISTICS, text("n c, c, c, c, c -> n c"), "n"),
    "a bias added by every rank": (
        case("linear.default", x(4, 8), x(4, 8), x(4)), text("... k, n k, n -> ... n"), "k"),
    "query, key and value mistaken for heads": (case("view.default", x(4, 24), (4, 3, 4, 2)), contiguous_heads, "h"),
    "channels of other groups": (IMAGE, contiguous_channels, "o"),
    "the second operand behind the first": (case("cat.default", (x(2, 4), x(2, 4)), 1), contiguous_joint, "r"),
    "a maximum taken for a sum": (case("amax.default", x(4, 8), (1,)), reduced(1, summed=True), "d1"),
    "keys apart": (ATTENTION, text("b h q e!, b h s e!, b h s v! -> b h q v!"), "s"),
    "queries that do not know their number": (CAUSAL, text("b h q e!, b h s! e!, b h s! v! -> b h q v!"), "q"),
    "a cumulative sum of parts": (case("cumsum.default", x(4, 8), 1), text("n c -> n c"), "c"),
    "a rolled dim apart": (case("roll.default", x(4, 8), (1,), (1,)), text("n c -> n c"), "c"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_wrong_rule_is_caught(name: str) -> None:
    found, function, label = PLANTED[name]
    this = example(found)
    shapes_read = tuple(map(this.shape_of, this.op.reads))
    rule = function(BoundCall(this.op, shapes_read, tuple(v.shape for v in this.op.outputs)))
    assert rule is not None
    chosen = strategy(rule, label, 2)
    assert chosen is not None
    with pytest.raises(AssertionError, match=r"^(output|gradient of x\d|updated x\d)( differs|:)"):
        check(this, rule, chosen, 2)


def test_a_split_that_torch_refuses_is_caught() -> None:
    this = example(case("layer_norm.default", x(4, 8), (8,)))
    rule = bind("n c -> n c", BoundCall(this.op, ((4, 8),), ((4, 8),)))
    assert rule is not None
    chosen = strategy(rule, "c", 2)
    assert chosen is not None
    with pytest.raises(RuntimeError, match="normalized_shape"):
        check(this, rule, chosen, 2)


def test_a_gradient_that_is_not_summed_is_caught() -> None:
    """The weight of a normalisation is read with split tokens: its gradient is a part of the whole."""
    this = example(case("layer_norm.default", x(4, 8), (8,), x(8)))
    rule = rule_for(this)
    right = strategy(rule, "d0", 2)
    assert right is not None
    check(this, rule, right, 2)
    wrong = replace(right, operands=(right.operands[0], REPLICATED))
    with pytest.raises(AssertionError, match="gradient of x1 differs"):
        check(this, rule, wrong, 2)
