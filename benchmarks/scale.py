"""What a database of a million trials costs: questions, sizes and write rates, on a synthetic one.

    python benchmarks/scale.py --db postgresql://me@localhost/empty --db big.sqlite -o benchmarks/results/scale.json

Each database must be empty. A fleet's year: 80 cases in 4 environments, 300 trials a run, three records a case.
"""

import json
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import click
from sqlalchemy import Connection, text

from tilewright.db.environment import Environment
from tilewright.db.reader import Reader
from tilewright.db.rows import Level, RecordRow, RunRow, Status, TrialRow, Verdict
from tilewright.db.store import Store
from tilewright.problem import WorkloadCase, load_problem

CASES, ENVIRONMENTS, TRIALS_A_RUN, RECORDS = 80, 4, 300, 3
WRITE_S = 5.0
GROUP = 64
NUMBERS = {
    "postgresql": "SELECT n FROM generate_series(1, {count}) AS n",
    "sqlite": "WITH RECURSIVE numbers(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < {count}) "
    "SELECT n FROM numbers",
}
TRIALS = """
INSERT INTO trials (run_id, case_id, environment_id, level, template, label, config, digest, source_hash, status,
                    reason, regime, compile_s, gpu_s, median_us, q1_us, q3_us, samples, error_ratio, registers,
                    shared_memory_bytes, spill_bytes, noisy, started_at, finished_at, attempt)
SELECT 1 + n / {a_run}, 1 + (n / {a_run}) % {cases}, 1 + (n / {a_run} / {cases}) % {environments},
       CASE n % 8 WHEN 0 THEN 'plan' ELSE 'stage' END, 'template' || n % 6, 'template' || n % 6,
       '{{"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64, "num_stages": 3, "num_warps": 8, "number": ' || n || '}}',
       'digest-of-this-candidate-' || n, 'source-hash-of-template-' || n % 6,
       CASE n % 20 WHEN 0 THEN 'wrong' ELSE 'ok' END, '', 'graph', 1.5, 0.3, 300 + n % 997, 299 + n % 997,
       301 + n % 997, 16, 1.0, 128, 98304, 0, '', NULL, {now}, 1
FROM ({numbers}) AS numbers
"""


@click.command()
@click.option("--db", "targets", multiple=True, required=True, metavar="PATH|URL")
@click.option("--trials", default=1_000_000, show_default=True)
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), required=True)
def main(targets: tuple[str, ...], trials: int, output: Path) -> None:
    """Fills each database, then measures it."""
    found = [measured(target, trials) for target in targets]
    content = {"host": platform.processor() or platform.machine(), "trials": trials, "databases": found}
    output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    click.echo(json.dumps(content, indent=1))


def measured(target: str, trials: int) -> dict[str, Any]:
    begun = time.monotonic()
    fill(target, trials)
    filled_s = time.monotonic() - begun
    with Store.open(target) as store, Reader.open(target) as reader:
        with store.engine.begin() as connection:
            connection.execute(text("ANALYZE"))
            kind = connection.dialect.name
            sizes = sizes_of(connection)
        return {
            "kind": kind,
            "filled_s": round(filled_s, 1),
            "questions_ms": questions(store, reader),
            "sizes_mb": sizes,
            "writes_per_s": writes(store),
        }


def a_case(number: int) -> WorkloadCase:
    return load_problem().parse_case(f"b{1 + number % 8}s{128 + 8 * (number // 8)}")


def an_environment(number: int) -> Environment:
    return Environment("cuda", f"NVIDIA H{200 + number}", 132, 141 << 30, "9.0", "3.6.0", torch="2.11.0")


def a_record(case: WorkloadCase, number: int) -> RecordRow:
    plan = [{"template": f"template{i}", "values": {"BLOCK_M": 64, "num_warps": 8}} for i in range(4)]
    evidence = {"finalists": [{"name": f"{i}", "plan": plan, "time_us": [1.0, 1.0, 1.0]} for i in range(8)]}
    return RecordRow(case.key, plan, f"plan{number}", "source", Verdict.BEATS_ALL, median_us=300.0, evidence=evidence)


def fill(target: str, trials: int) -> None:
    runs = trials // TRIALS_A_RUN + 1
    with Store.open(target) as store:
        for number in range(CASES):
            store.case(a_case(number))
        run = RunRow("tune", 0, "standard", "0.1.0", "1")
        ids = [store.begin_run(run, an_environment(number)) for number in range(ENVIRONMENTS)]
        for number in range(CASES * ENVIRONMENTS * RECORDS):
            case, environment = a_case(number % CASES), an_environment(number // CASES % ENVIRONMENTS)
            store.activate(ids[number // CASES % ENVIRONMENTS], case, environment, a_record(case, number))
        with store.engine.begin() as connection:
            numbers = NUMBERS[connection.dialect.name]
            columns = "environment_id, command, seed, effort, tool_version, protocol, status, note, host, pid, device, "
            columns += "process_started_s, started_at"
            more = numbers.format(count=runs)
            connection.execute(
                text(
                    f"INSERT INTO runs ({columns}) SELECT 1 + n / {CASES} % {ENVIRONMENTS}, 'tune', n, 'standard', "
                    f"'0.1.0', '1', 'done', '', 'host', n, 'cuda:0', 0.0, CURRENT_TIMESTAMP FROM ({more}) AS numbers"
                )
            )
            connection.execute(text(trial_statement(connection, numbers.format(count=trials))))


def trial_statement(connection: Connection, numbers: str) -> str:
    statement = TRIALS.format(
        a_run=TRIALS_A_RUN, cases=CASES, environments=ENVIRONMENTS, now="CURRENT_TIMESTAMP", numbers=numbers
    )
    # a JSON column takes no text without being told
    return (
        statement
        if connection.dialect.name == "sqlite"
        else statement.replace("n || '}'", "n || '}')::json").replace('\'{"BLOCK_M"', '(\'{"BLOCK_M"')
    )


def questions(store: Store, reader: Reader) -> dict[str, float]:
    case, environment = a_case(7), an_environment(1)
    asked: dict[str, Callable[[], object]] = {
        "known trials of a case, before its search": lambda: store.trials(case_key=case.key, env=environment),
        "active record of a case": lambda: store.active_record(case, environment),
        "all active records": reader.active_records,
        "history of a case": lambda: reader.record_history(case.key),
        "trials by status": reader.counts,
        "runs with their trials": reader.runs,
    }
    return {name: round(milliseconds(question), 1) for name, question in asked.items()}


def milliseconds(question: Callable[[], object]) -> float:
    """Median of five, after one to warm up."""
    times = []
    for _ in range(6):
        begun = time.perf_counter()
        question()
        times.append(1000 * (time.perf_counter() - begun))
    return median(times[1:])


def sizes_of(connection: Connection) -> dict[str, float]:
    if connection.dialect.name == "postgresql":
        names = (
            "SELECT relname, pg_relation_size(oid) FROM pg_class WHERE relname LIKE '%trials%' OR relname LIKE '%runs%'"
        )
    else:
        names = "SELECT name, sum(pgsize) FROM dbstat WHERE name LIKE '%trials%' OR name LIKE '%runs%' GROUP BY name"
    return {row[0]: round(row[1] / 1e6, 1) for row in connection.execute(text(names)) if row[1] > 1e6}


def writes(store: Store) -> dict[str, float]:
    """One client: a trial a transaction, and as a fleet's worker under load groups them."""
    case, environment = a_case(3), an_environment(2)
    run_id = store.begin_run(RunRow("tune", 0, "standard", "0.1.0", "1"), environment)
    trial = TrialRow(case.key, Level.STAGE, "t", "t", {"BLOCK_M": 64}, "", "source", Status.OK, median_us=300.0)

    def rate(write: Callable[[int], None], each: int, prefix: int) -> float:
        begun, count = time.monotonic(), 0
        while time.monotonic() - begun < WRITE_S:
            write(prefix + count)
            count += each
        return round(count / (time.monotonic() - begun))

    def group(first: int) -> None:
        rows = [(case, replace(trial, digest=f"digest{first + number}")) for number in range(GROUP)]
        store.add_trials(run_id, environment, rows)

    def single(number: int) -> None:
        store.add_trial(run_id, case, environment, replace(trial, digest=f"digest{number}"))

    return {"one a transaction": rate(single, 1, 0), f"{GROUP} a transaction": rate(group, GROUP, 10**8)}


if __name__ == "__main__":
    main()
