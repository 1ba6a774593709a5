"""R2: SQLite and PostgreSQL give equal histories; and what only PostgreSQL can suffer."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from polynya.errors import RegistryInUse, RegistryUnavailable
from polynya.rollout.registry.postgres import PostgresDatabase

from .machine import MAX_LOSSES, Backend, RegistryMachine, SqliteBackend, seen
from .servers import PostgresServer
from .world import LEASE, direct, hello, registry_over, size, task

pytestmark = pytest.mark.postgres


class PostgresBackend(Backend):
    def __init__(self, server: PostgresServer) -> None:
        self.server = server
        self.url = server.fresh()
        self.registry = direct(self.url, max_losses=MAX_LOSSES)

    def crash(self, now: float) -> None:
        self.registry.close()
        self.registry = direct(self.url, now=now, max_losses=MAX_LOSSES)

    def drop(self) -> None:
        self.registry.close()
        self.server.drop(self.url)


def test_both_give_equal_histories(postgres: PostgresServer) -> None:
    class Both(RegistryMachine):
        def backends(self) -> list[Backend]:
            return [SqliteBackend(), PostgresBackend(postgres)]

    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Both,
        settings=settings(
            max_examples=size(40, 2_000),
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_lost_connection_between_operations_is_not_noticed(postgres: PostgresServer) -> None:
    registry = direct(postgres.fresh())
    registry.submit(task("a"))
    assert postgres.cut() == 2
    assert registry.submit(task("b")).created
    assert [found.task_id for found in registry.tasks()] == ["a", "b"]
    registry.close()


def test_second_server_is_refused_while_the_first_lives(postgres: PostgresServer) -> None:
    url = postgres.fresh()
    first = direct(url)
    with pytest.raises(RegistryInUse, match="another server"):
        PostgresDatabase(url, write=True, connect_seconds=1)
    first.submit(task())
    first.close()
    second = direct(url)
    assert seen(second)["tasks"] == [("t", "open", 1, 0, 0, 0)]
    second.close()


def test_server_that_lost_its_place_to_another_changes_nothing_more(postgres: PostgresServer) -> None:
    url = postgres.fresh()
    first = registry_over(lambda write: PostgresDatabase(url, write, connect_seconds=1))
    first.start(0.0, LEASE)
    postgres.cut()
    second = direct(url)
    with pytest.raises(RegistryInUse):
        first.register(hello(), 0.0, 10.0)
    assert second.nodes() == []
    second.close()
    first.close()


def test_error_tells_neither_address_nor_password(postgres: PostgresServer) -> None:
    with pytest.raises(RegistryUnavailable) as caught:
        direct("postgresql://someone:hunter2@127.0.0.1:1/nothing?connect_timeout=1")
    assert "hunter2" not in str(caught.value)
    assert caught.value.fix
