"""Rules of products, attention and normalisations where one text does not fit all their arguments."""

from __future__ import annotations

from autopar.sharding.bound_call import BoundCall, Shape, broadcast_letters, broadcast_shape, dim_letters, make_rule
from autopar.sharding.rule import Dims, Rule


def matmul(call: BoundCall) -> Rule | None:
    """Vectors, matrices, or batches of matrices that are broadcast."""
    left, right = call.operands if len(call.operands) == 2 else ((), ())
    batch = broadcast_shape([left[:-2], right[:-2]])
    if not left or not right or batch is None:
        return None
    letters = dim_letters(batch)
    rows: Dims = (("n",),) if len(left) > 1 else ()
    columns: Dims = (("m",),) if len(right) > 1 else ()
    lead = broadcast_letters(left[:-2], batch, letters), broadcast_letters(right[:-2], batch, letters)
    if lead[0] is None or lead[1] is None:
        return None
    operands = [(*lead[0], *rows, ("k",)), (*lead[1], ("k",), *columns)]
    return make_rule(call, operands, [(*letters, *rows, *columns)], summed="k")


def add_matmul(call: BoundCall) -> Rule | None:
    """addmm and baddbmm: the first operand is broadcast onto the product and added to it."""
    product: Dims = (("b",), ("n",), ("m",))[-len(call.outputs[0]) :]
    batch = product[:-2]
    added = broadcast_letters(call.operands[0], call.outputs[0], product)
    if added is None:
        return None
    operands = [added, (*batch, ("n",), ("k",)), (*batch, ("k",), ("m",))]
    return make_rule(call, operands, [product], summed="k", added=[0])


def einsum(call: BoundCall) -> Rule | None:
    """The equation's letters, and those of an ellipsis; letters that the output lacks are summed over."""
    left, arrow, right = call.argument(0, "equation").replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(call.operands):
        return None
    letters = set(left) - {",", "."}
    if not arrow:  # numpy's rule: the dims of the ellipsis, then letters that occur once
        right = "..." * ("..." in left) + "".join(sorted(x for x in letters if left.count(x) == 1))
    elided = [elided_dims(term, shape) for term, shape in zip(terms, call.operands)]
    onto = broadcast_shape(elided)
    if onto is None:
        return None
    batch = dim_letters(onto)
    parts = [broadcast_letters(shape, onto, batch) for shape in elided]
    operands = [einsum_dims(term, part) for term, part in zip(terms, parts) if part is not None]
    made = einsum_dims(right, batch)
    taken_twice = [x for x in letters if any(term.count(x) > 1 for term in terms)]
    summed = [x for dims in operands for dim in dims for x in dim if dim not in made]
    return make_rule(call, operands, [made], summed=summed, whole=taken_twice)


def elided_dims(term: str, shape: Shape) -> Shape:
    """Sizes of the dims that a term's ellipsis stands for."""
    before, dots, after = term.partition("...")
    return shape[len(before) : len(shape) - len(after)] if dots else ()


def einsum_dims(term: str, elided: Dims) -> Dims:
    """Letters of a term's dims, those of its ellipsis being ``elided``."""
    before, dots, after = term.partition("...")
    return (*((x,) for x in before), *(elided if dots else ()), *((x,) for x in after))


def attention(call: BoundCall) -> Rule | None:
    """scaled_dot_product_attention: batch, heads, and queries where no causal mask counts them.

    Keys are whole, since softmax runs over them. With dropout all letters are whole, as in any random operation.
    """
    if len(call.operands) < 3:
        return None
    (query, key, value, *masks), made = call.operands, call.outputs[0]
    batch = dim_letters(made[:-2])
    sizes = {f"d{i}": size for i, size in enumerate(made[:-2])} | {"q": query[-2], "s": key[-2]}
    of_query, of_key, of_value = (broadcast_letters(shape[:-2], made[:-2], batch) for shape in (query, key, value))
    if call.argument(7, "enable_gqa", False) and len(made) > 2 and query[-3] % key[-3] == 0:
        # query head j reads key head j // (query heads / key heads)
        sizes |= {"h": key[-3], "g": query[-3] // key[-3]}
        of_key = of_value = (*batch[:-1], ("h",))
        of_query = batch = (*batch[:-1], ("h", "g"))
    if of_query is None or of_key is None or of_value is None:
        return None
    operands: list[Dims] = [(*of_query, ("q",), ("e",)), (*of_key, ("s",), ("e",)), (*of_value, ("s",), ("v",))]
    scores = (*made[:-1], key[-2])
    for mask in masks:
        dims = broadcast_letters(mask, scores, (*batch, ("q",), ("s",)))
        if dims is None:
            return None
        operands.append(dims)
    whole = {"s", "e", "v"}
    if call.argument(5, "is_causal", False):
        whole |= {"q"}
    if call.argument(4, "dropout_p", 0.0):
        whole |= sizes.keys()
    return make_rule(call, operands, [(*batch, ("q",), ("v",))], sizes=sizes, whole=whole)


def layer_norm(call: BoundCall) -> Rule | None:
    """The normalised dims, the last ones, are whole (also rms_norm)."""
    letters = dim_letters(call.operands[0])
    normalised = letters[len(letters) - len(call.argument(1, "normalized_shape")) :]
    operands = [letters] + [normalised] * (len(call.operands) - 1)
    return make_rule(call, operands, [letters], whole=[dim[0] for dim in normalised])


def embedding(call: BoundCall) -> Rule | None:
    """Rows of a table: their gradients are sums, unless divided by each row's count in the batch, or sparse."""
    letters = dim_letters(call.operands[1])
    unlike_sums = call.argument(3, "scale_grad_by_freq", False) or call.argument(4, "sparse", False)
    whole = ["v", *(dim[0] for dim in letters)] if unlike_sums else ["v"]
    return make_rule(call, [(("v",), ("e",)), letters], [(*letters, ("e",))], whole=whole)
