"""Brute-force solver of cuts and shardings together, which shares no code with autopar."""

from __future__ import annotations

from itertools import product

from autopar.solve.joint.problem import JointProblem


def brute_force(problem: JointProblem) -> float | None:
    """Least step time over all strategies and stages that obey the rules, or None where none does."""
    graph, last = problem.graph, problem.stages - 1
    made_by = {value: g for g, group in enumerate(graph.groups) for value in group.makes}
    stages = [
        (*first, last)
        for first in product(range(problem.stages), repeat=len(graph.groups) - 1)
        if set(first) == set(range(problem.stages))
    ]
    stages = [
        stage_of
        for stage_of in stages
        if all(stage_of[made_by[v]] <= stage_of[g] for g, group in enumerate(graph.groups) for v in group.reads)
        and all(stage_of[g] == s for g, s in problem.pins.items())
        and all(len({stage_of[g] for g in names}) == 1 for names in problem.colocated)
    ]
    values = [
        step_seconds(problem, choice, stage_of)
        for choice in allowed(problem)
        for stage_of in stages
        if problem.capacity_bytes is None or max(memory(problem, choice, stage_of)) <= problem.capacity_bytes
    ]
    return min(values, default=None)


def allowed(problem: JointProblem) -> list[tuple[int, ...]]:
    """Strategy indices, [groups], under which equal kinds and shared weights are sharded alike."""
    groups, consistent = problem.graph.groups, []
    for choice in product(*(range(len(g.strategies)) for g in groups)):
        stored: dict[str, set[str]] = {}
        for g, k in zip(groups, choice):
            for weight, layout in zip(g.weights, g.strategies[k].weight_layouts):
                stored.setdefault(weight, set()).add(str(layout))
        alike = all(i == k for g, i in zip(groups, choice) for h, k in zip(groups, choice) if g.kind == h.kind)
        if (alike or not problem.share_kinds) and all(len(layouts) == 1 for layouts in stored.values()):
            consistent.append(choice)
    return consistent


def step_seconds(problem: JointProblem, choice: tuple[int, ...], stage_of: tuple[int, ...]) -> float:
    groups = problem.graph.groups
    chosen = [g.strategies[k] for g, k in zip(groups, choice)]
    made = {v: (s, layout) for g, c, s in zip(groups, chosen, stage_of) for v, layout in zip(g.makes, c.output_layouts)}
    read = {(v, layout, s) for g, c, s in zip(groups, chosen, stage_of) for v, layout in zip(g.reads, c.input_layouts)}
    times, steps = [], []
    for stage in range(problem.stages):
        on_stage = [c for c, s in zip(chosen, stage_of) if s == stage]
        time = sum(c.forward_seconds + c.backward_seconds for c in on_stage)
        for v, layout, s in read:
            if s == stage and made[v][1] != layout:
                resharding = problem.graph.resharding[v, made[v][1], layout]
                time += resharding.forward_seconds + resharding.backward_seconds
        over = {v for v, _, s in read if made[v][0] <= stage < s}
        num_bytes = sum(problem.graph.value_bytes[v] / (problem.ranks if made[v][1].splits else 1) for v in over)
        if num_bytes:
            link = problem.boundary[stage]
            time += 2 * (link.latency_seconds + num_bytes / link.bytes_per_second)
        times.append(time)
        steps.append(sum(c.step_seconds for c in on_stage))
    return (problem.microbatches - 1) * max(times) + sum(times) + max(steps)


def memory(problem: JointProblem, choice: tuple[int, ...], stage_of: tuple[int, ...]) -> list[int]:
    needs, made = [0] * problem.stages, {}
    copies: set[tuple] = set()
    for group, k, s in zip(problem.graph.groups, choice, stage_of):
        strategy = group.strategies[k]
        needs[s] += strategy.weight_bytes + problem.in_flight[s] * strategy.saved_bytes
        copies |= {(s, v, made[v], read) for v, read in zip(group.reads, strategy.input_layouts) if made[v] != read}
        made |= dict(zip(group.makes, strategy.output_layouts))
    for s, *copied in copies:
        needs[s] += problem.in_flight[s] * problem.graph.resharding[tuple(copied)].saved_bytes
    return needs
