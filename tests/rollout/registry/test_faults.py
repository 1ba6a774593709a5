"""R12: the n-th statement fails, for every n. The operation is then as if it had not been asked for, or it was carried out whole."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from polynya.errors import PolynyaError, RegistryUnavailable
from polynya.rollout.registry.base import Completion, Held
from polynya.rollout.registry.database import Busy, Database, Row
from polynya.rollout.registry.sqlite import SqliteDatabase
from polynya.schema import Status

from .machine import seen
from .world import LEASE, Direct, completion, direct, hello, registry_over, result, task


class Fault:
    """Fails the statement ``at``, counted from 0; all others work."""

    def __init__(self, error: Callable[[], Exception], at: int = -1, *, after: bool = False) -> None:
        self.error = error
        self.at = at
        self.after = after
        """The statement is carried out, and only its answer is lost."""
        self.statements = 0

    def around(self, work: Callable[[], Any]) -> Any:
        hit, self.statements = self.statements == self.at, self.statements + 1
        if hit and not self.after:
            raise self.error()
        value = work()
        if hit:
            raise self.error()
        return value


class FaultyDatabase:
    """A database with a fault before it."""

    def __init__(self, inner: Database, fault: Fault) -> None:
        self.inner = inner
        self.fault = fault
        self.recover, self.close = inner.recover, inner.close

    def begin(self, write: bool) -> None:
        self.fault.around(lambda: self.inner.begin(write))

    def commit(self) -> None:
        self.fault.around(self.inner.commit)

    def execute(self, sql: str, params: Sequence[Any] = ()) -> list[Row]:
        return self.fault.around(lambda: self.inner.execute(sql, params))  # type: ignore[no-any-return]

    def many(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        self.fault.around(lambda: self.inner.many(sql, rows))


def faulty(path: Path, fault: Fault) -> Direct:
    """Its fault counts from the end of its start."""

    def connect(write: bool) -> Database:
        found = SqliteDatabase(path, write)
        return FaultyDatabase(found, fault) if write else found

    return registry_over(connect)


def scene(registry: Direct) -> None:
    """A group of four: one has its result, one runs, one runs and was cancelled, one waits."""
    registry.start(0.0, LEASE)
    registry.submit(task("t", 4, early_stop=2, retries=1, callback="http://receiver/"))
    registry.register(hello("n", 1), 0.0, LEASE)
    registry.register(hello("m", 1), 0.0, LEASE)
    leases = registry.claim("n", 1, 3, 0.0, LEASE).sessions
    registry.renew("n", 1, 1, [Held(s.session_id, 1) for s in leases], 0.0, LEASE)
    registry.complete(completion(leases[0]))
    registry.cancel_session("t.2")


def report(status: Status) -> Completion:
    return Completion(node="n", result=result("t.1", 1, status), retry=True)


OPERATIONS: dict[str, Callable[[Direct], Any]] = {
    "submit": lambda r: r.submit(task("u", 3)),
    "claim": lambda r: r.claim("m", 1, 2, 0.0, LEASE),
    "complete and stop the group early": lambda r: r.complete(report(Status.COMPLETED)),
    "complete with an infrastructure failure": lambda r: r.complete(report(Status.INFRA_ERROR)),
    "renew": lambda r: r.renew("n", 1, 2, [Held("t.2", 1)], 1.0, LEASE),
    "expire": lambda r: r.expire(LEASE),
    "cancel": lambda r: r.cancel_task("t"),
    "register": lambda r: r.register(hello("n", 2), 0.0, LEASE),
    "leave": lambda r: r.leave("n"),
    "suspect": lambda r: r.suspect("n", 1.0),
    "ack": lambda r: r.ack("t.0"),
    "policy": lambda r: r.set_policy("", version="7"),
}
everywhere = pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)


def broken() -> Exception:
    return RegistryUnavailable("disk I/O error")


def without_fault(path: Path, operation: Callable[[Direct], Any]) -> tuple[Any, Any, int]:
    """What is seen before and after it, and how many statements it takes."""
    fault = Fault(broken)
    registry = faulty(path, fault)
    scene(registry)
    before, fault.statements = seen(registry), 0
    operation(registry)
    statements, done = fault.statements, seen(registry)
    registry.close()
    return before, done, statements


@contextmanager
def failing(path: Path, fault: Fault, at: int) -> Iterator[Direct]:
    registry = faulty(path, fault)
    scene(registry)
    fault.statements, fault.at = 0, at
    yield registry
    registry.close()


@everywhere
def test_busy_database_is_asked_again(tmp_path: Path, operation: Callable[[Direct], Any]) -> None:
    _, done, statements = without_fault(tmp_path / "r.db", operation)
    for n in range(statements):
        with failing(tmp_path / f"{n}.db", Fault(lambda: Busy("locked")), n) as registry:
            operation(registry)
            assert seen(registry) == done


@everywhere
def test_broken_statement_leaves_nothing_of_the_operation(tmp_path: Path, operation: Callable[[Direct], Any]) -> None:
    before, done, statements = without_fault(tmp_path / "r.db", operation)
    for n in range(statements):
        with failing(tmp_path / f"{n}.db", Fault(broken), n) as registry:
            with pytest.raises(RegistryUnavailable):
                operation(registry)
            assert seen(registry) == before
            operation(registry)
            assert seen(registry) == done


@everywhere
def test_operation_whose_answer_was_lost_was_carried_out_whole_or_not_at_all(
    tmp_path: Path, operation: Callable[[Direct], Any]
) -> None:
    before, done, statements = without_fault(tmp_path / "r.db", operation)
    for n in range(statements):
        with failing(tmp_path / f"{n}.db", Fault(broken, after=True), n) as registry:
            with pytest.raises(RegistryUnavailable):
                operation(registry)
            assert seen(registry) == (done if n == statements - 1 else before)


def test_start_that_fails_anywhere_may_be_tried_again(tmp_path: Path) -> None:
    fault = Fault(broken)
    first = faulty(tmp_path / "r.db", fault)
    scene(first)
    before = seen(first)
    first.close()
    fault.statements = 0
    again = faulty(tmp_path / "r.db", fault)
    again.start(0.0, LEASE)
    again.close()
    statements = fault.statements
    for n in range(statements):
        with closing(faulty(tmp_path / "r.db", Fault(broken, n))) as failed, pytest.raises(RegistryUnavailable):
            failed.start(0.0, LEASE)
    with closing(direct(tmp_path / "r.db")) as registry:
        assert seen(registry) == before


def test_full_disk_fails_an_operation_and_space_mends_it(tmp_path: Path) -> None:
    """Not injected: SQLite's own bound on the pages of a file."""
    databases: list[SqliteDatabase] = []

    def connect(write: bool) -> Database:
        databases.append(SqliteDatabase(tmp_path / "r.db", write))
        return databases[-1]

    registry = registry_over(connect)
    registry.start(0.0, LEASE)
    databases[0].execute("PRAGMA max_page_count = 80")
    taken = 0
    with pytest.raises(RegistryUnavailable, match="SQLITE_FULL") as caught:
        for i in range(10_000):
            registry.submit(task(f"t{i}", 5))
            taken += 1
    assert "space" in caught.value.fix
    assert registry.counts().tasks == taken == len(registry.tasks(limit=10_000))
    databases[0].execute("PRAGMA max_page_count = 100000")
    assert registry.submit(task(f"t{taken}", 5)).created
    assert registry.counts().queued == 5 * (taken + 1)
    registry.close()


def test_database_that_another_program_holds_is_unavailable_until_it_lets_go(tmp_path: Path) -> None:
    registry = registry_over(lambda write: SqliteDatabase(tmp_path / "r.db", write, busy_seconds=0.01))
    registry.start(0.0, LEASE)
    with closing(sqlite3.connect(tmp_path / "r.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(RegistryUnavailable, match="busy 5 times"):
            registry.submit(task())
        other.execute("ROLLBACK")
    assert registry.submit(task()).created
    registry.close()


@pytest.mark.parametrize("content", [b"no database" * 1000, b"\0" * 100])
def test_file_that_is_no_database_is_refused_and_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "r.db"
    path.write_bytes(content)
    with pytest.raises(PolynyaError, match=r"r\.db.*SQLITE_NOTADB"):
        direct(path)
    assert path.read_bytes() == content


def test_folder_where_nobody_may_write_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RegistryUnavailable, match=r"file/r\.db: File exists") as caught:
        direct(tmp_path / "file" / "r.db")
    assert caught.value.fix
