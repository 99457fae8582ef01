"""The checker finds what it is there to find."""

from __future__ import annotations

from pathlib import Path

from tests.faults.matrix.cells import FAULTS, all_cells, choose, may_stop
from tests.faults.matrix.checker import Checks, check_forward, check_trained_once
from tests.faults.matrix.recorder import Committed, Generation, Record, Seen, Trained
from tests.faults.matrix.run import Result, RunOutcome
from tests.faults.matrix.table import Results, written

PROMPT = (1, 2)


def record(tmp_path: Path) -> Record:
    return Record("run", tmp_path)


def generation(seed: int, tokens: tuple[int, ...] = (7, 8)) -> Generation:
    name = "run-v1"
    return Generation(0.0, "proxy-replica-1", name, name, seed, PROMPT, tokens, (-0.5, -1.5))


def taken(tokens: tuple[int, ...] = (7, 8)) -> Trained:
    return Trained(1.0, "life", PROMPT, tokens, (-0.5, -1.5))


def once(made: Record) -> list[str]:
    checks = Checks()
    check_trained_once(made, checks)
    return checks.problems


def forward(made: Record) -> list[str]:
    checks = Checks()
    check_forward(made, checks)
    return checks.problems


def test_equal_rollouts_of_two_requests_may_both_be_trained(tmp_path: Path) -> None:
    made = record(tmp_path)
    made.generations += [generation(1), generation(2)]
    made.trained += [taken(), taken()]
    assert once(made) == []


def test_a_rollout_that_was_generated_twice_for_one_request_is_trained_once(tmp_path: Path) -> None:
    made = record(tmp_path)
    made.generations += [generation(1), generation(1)]
    made.trained += [taken(), taken()]
    assert "trained 2 times and generated 1 times" in once(made)[0]


def test_what_nobody_generated_is_not_trained(tmp_path: Path) -> None:
    made = record(tmp_path)
    made.generations.append(generation(1))
    made.trained.append(taken((7, 9)))
    assert "generated 0 times" in once(made)[0]


def test_a_version_that_goes_backwards_is_found(tmp_path: Path) -> None:
    made = record(tmp_path)
    made.committed += [Committed(float(v), 1, v, "running", {v: "a"}) for v in (1, 3, 2)]
    made.seen += [Seen(1.0, "replica-1", (2, 3)), Seen(2.0, "replica-1", (1, 2))]
    problems = " ".join(forward(made))
    assert "latest went from 3 to 2" in problems
    assert "replica-1 went from 3 to 2" in problems


def test_a_replica_may_be_empty_after_a_restart_but_not_behind(tmp_path: Path) -> None:
    made = record(tmp_path)
    made.seen += [Seen(float(i), "r", ready) for i, ready in enumerate([(3,), (), (4,)])]
    assert forward(made) == []
    made.seen.append(Seen(4.0, "r", (2,)))
    assert forward(made) == ["r went from 4 to 2"]


def test_a_number_with_two_contents_is_found(tmp_path: Path) -> None:
    made = record(tmp_path)
    made.committed += [Committed(float(i), 1, 1, "running", {1: d}) for i, d in enumerate("ab")]
    assert forward(made) == ["version 1 has two contents"]


def test_a_resumed_trainer_that_uses_numbers_again_is_found(tmp_path: Path) -> None:
    made = record(tmp_path)
    made.committed.append(Committed(1.0, 1, 9, "running", {9: "a"}))
    made.events += [
        {"life": "a", "began": 0, "epoch": 1, "version": 1, "at": 0.0},
        {"life": "b", "began": 6, "epoch": 2, "version": 9, "at": 2.0},
    ]
    assert forward(made) == ["trainer b began with version 9 after 9"]


def test_every_fault_of_the_issue_meets_every_phase() -> None:
    met = {(cell.fault.name, cell.phase) for cell in all_cells()}
    for fault in (
        "kill", "stop", "cut", "latency", "503", "read-only", "corrupt", "clock", "disk",
        "certificate", "token", "second-trainer",
    ):  # fmt: skip
        for phase in ("snapshot", "publish", "load", "generation", "checkpoint"):
            assert (fault, phase) in met


def test_cells_are_chosen_by_any_part_of_their_name() -> None:
    assert len(choose("all")) == len({cell.key for cell in all_cells()})
    assert [cell.key for cell in choose("kill/trainer:load,corrupt:load")] == [
        "kill/trainer:load",
        "corrupt/store:load",
    ]
    assert len(choose("kill:load")) == 4


def test_only_the_errors_that_a_fault_names_may_stop_a_trainer() -> None:
    faults = {fault.key: fault for fault in FAULTS}
    assert may_stop(faults["read-only/store"], "StoreDenied: runs/x: AccessDenied")
    assert not may_stop(faults["read-only/store"], "KeyError: 'x'")
    assert not may_stop(faults["kill/trainer"], "StoreDenied: no")
    died = "RuntimeError: Rollout worker child has failed; see chained exception."
    assert may_stop(faults["token/proxy"], died)
    assert not may_stop(faults["token/proxy"], "RuntimeError: CUDA error")


def test_the_table_says_what_was_not_run_and_what_failed(tmp_path: Path) -> None:
    results = Results()
    good = Result("kill/trainer:load", "went on after restart", recovery_s=12.4)
    bad = Result("kill/trainer:publish", "failed: latest went from 3 to 2")
    checks = Checks(completions=10, recomputed=10)
    results.add(RunOutcome([good, bad], checks), "run-1", machine="a machine", took_s=90.0)
    results.write(tmp_path / "results.json")
    results = Results.read(tmp_path / "results.json")
    (row,) = (line for line in written(results).split("\n") if line.startswith("| kill: kill -9 |"))
    assert [cell.strip() for cell in row.split("|")[3:-1]] == [
        "not run yet",
        "failed: latest went from 3 to 2",
        "went on after restart, 12 s",
        "not run yet",
        "not run yet",
    ]
    assert "2 cells in 1 training runs, 1 failed" in written(results)
    assert "took 2 minutes" in written(results)
    assert results.has(good.key)
    assert not results.has(bad.key)
