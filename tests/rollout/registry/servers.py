"""A PostgreSQL server of the tests' own, and databases in it."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import psycopg

_FOLDERS = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)


def _program(name: str) -> str:
    found = shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), *map(str, _FOLDERS)]))
    if found is None:
        raise RuntimeError(f"{name} is not installed; fix: apt-get install postgresql")
    return found


class PostgresServer:
    """On a socket in a folder of its own; no port. As root it runs as ``nobody``, since PostgreSQL refuses root."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="pg"))
        self.user = "nobody" if os.geteuid() == 0 else None
        if self.user:
            shutil.chown(self.folder, self.user)
        self._schemas = 0
        data = self.folder / "data"
        self._run("initdb", "-D", str(data), "-U", "tests", "-A", "trust", "--no-sync", "-E", "UTF8")
        options = f"-k {self.folder} -h '' -c fsync=off -c max_connections=40"
        self._run("pg_ctl", "-D", str(data), "-o", options, "-l", str(self.folder / "log"), "-w", "start")
        self.admin = psycopg.connect(self.url(), autocommit=True)

    def _run(self, name: str, *args: str) -> None:
        done = subprocess.run(
            [_program(name), *args], user=self.user, cwd=self.folder, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{name}: {done.stdout.decode(errors='replace')}")

    def url(self, schema: str = "public") -> str:
        return f"postgresql://tests@/postgres?host={self.folder}&options=-csearch_path%3D{schema}"

    def fresh(self) -> str:
        """The URL of an empty schema."""
        self._schemas += 1
        name = f"s{self._schemas}"
        self.admin.execute(f"CREATE SCHEMA {name}")
        return self.url(name)

    def drop(self, url: str) -> None:
        self.admin.execute(f"DROP SCHEMA {url.rpartition('3D')[2]} CASCADE")

    def cut(self) -> int:
        """Every connection but our own is broken; how many."""
        rows = self.admin.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
        )
        return len(rows.fetchall())

    def stop(self) -> None:
        self.admin.close()
        self._run("pg_ctl", "-D", str(self.folder / "data"), "-m", "immediate", "-w", "stop")
        shutil.rmtree(self.folder)
