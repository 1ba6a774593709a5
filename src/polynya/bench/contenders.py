<<<<<<< HEAD
"""Who is measured beside polynya, and how each is started.

A contender that is not there is no error: ``Missing`` says why and how to get it.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
=======
"""polynya, and what it is measured against first: nginx and a plain pass-through. The others are in ``peers``."""

from __future__ import annotations

import os
import shutil
>>>>>>> 97b387fbd882dd22383392c0079d5c1661ee35d6

import msgspec

from polynya.bench.hosted import Hosting
from polynya.bench.load import Endpoint
<<<<<<< HEAD
from polynya.bench.processes import BenchFailed, Program
from polynya.bench.workload import Spec


class Missing(Exception):
    """Not here; the text says why, and what to do."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where and for whom a contender is started."""

    spec: Spec
    upstream: int
    folder: Path
    core: set[int]
    sessions: int


class Running(msgspec.Struct, frozen=True, kw_only=True):
    program: Program
    endpoint: Endpoint


class Contender(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    does: str
    """In a few words, for the table."""
    start: Callable[[Place], Awaitable[Running]]


async def _polynya(place: Place) -> Running:
    folder = place.folder / "capture"
    hosting = Hosting(spec=place.spec, upstream=place.upstream, folder=str(folder), sessions=place.sessions)
    program = await Program.module(
        "hosted", msgspec.json.encode(hosting).decode(), core=place.core, log=place.folder / "polynya.log"
=======
from polynya.bench.peers import PEERS
from polynya.bench.places import Contender, Missing, Place, Running, free_port, listening
from polynya.bench.processes import BenchFailed, Program


async def _polynya(place: Place) -> Running:
    return await _polynya_with(place, "polynya", "fsync")


async def _polynya_write(place: Place) -> Running:
    """Its records are handed to the kernel and not waited for: what the disk itself costs is the difference."""
    return await _polynya_with(place, "polynya-write", "write")


async def _polynya_with(place: Place, name: str, durability: str) -> Running:
    folder = place.folder / f"{name}.capture"
    hosting = Hosting(
        spec=place.spec, upstream=place.upstream, folder=str(folder), sessions=place.sessions, durability=durability
    )
    program = await Program.module(
        "hosted", msgspec.json.encode(hosting).decode(), core=place.core, log=place.folder / f"{name}.log"
>>>>>>> 97b387fbd882dd22383392c0079d5c1661ee35d6
    )
    ready = await program.read()
    if not ready["trainable"]:
        raise BenchFailed("the gateway finds the mock upstream not trainable")
<<<<<<< HEAD
    endpoint = Endpoint(name="polynya", port=ready["port"], dialect="anthropic", paths=tuple(ready["paths"]))
=======
    endpoint = Endpoint(name=name, port=ready["port"], dialect="anthropic", paths=tuple(ready["paths"]))
>>>>>>> 97b387fbd882dd22383392c0079d5c1661ee35d6
    return Running(program=program, endpoint=endpoint)


async def _pass(place: Place) -> Running:
    program = await Program.module("passing", str(place.upstream), core=place.core, log=place.folder / "pass.log")
    return Running(program=program, endpoint=Endpoint(name="pass", port=(await program.read())["port"]))


_NGINX = """
daemon off;
worker_processes 1;
<<<<<<< HEAD
=======
{user}
>>>>>>> 97b387fbd882dd22383392c0079d5c1661ee35d6
pid {folder}/nginx.pid;
error_log stderr warn;
events {{ worker_connections 4096; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  client_max_body_size 64m;
<<<<<<< HEAD
  client_body_buffer_size 4m;
=======
  {buffers}
>>>>>>> 97b387fbd882dd22383392c0079d5c1661ee35d6
  keepalive_requests 100000000;
  upstream engine {{ server 127.0.0.1:{upstream}; keepalive 1024; keepalive_requests 100000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=2048;
    location / {{
      proxy_pass http://engine;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_read_timeout 600s;
<<<<<<< HEAD
      proxy_buffers 64 64k;
      proxy_buffer_size 64k;
      proxy_busy_buffers_size 128k;
      proxy_max_temp_file_size 0;
=======
>>>>>>> 97b387fbd882dd22383392c0079d5c1661ee35d6
    }}
  }}
}}
"""


<<<<<<< HEAD
async def _nginx(place: Place) -> Running:
=======
_IN_MEMORY = """client_body_buffer_size 4m;
  proxy_buffers 64 64k;
  proxy_buffer_size 64k;
  proxy_busy_buffers_size 128k;
  proxy_max_temp_file_size 0;"""


async def _nginx(place: Place) -> Running:
    return await _nginx_with(place, "nginx", _IN_MEMORY)


async def _nginx_disk(place: Place) -> Running:
    """With its default buffers it writes each large body, and each large answer, into a file."""
    return await _nginx_with(place, "nginx-disk", "")


async def _nginx_with(place: Place, name: str, buffers: str) -> Running:
>>>>>>> 97b387fbd882dd22383392c0079d5c1661ee35d6
    binary = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
    if binary is None:
        raise Missing("not installed; apt-get install nginx")
    port = free_port()
<<<<<<< HEAD
    config = place.folder / "nginx.conf"
    config.write_text(_NGINX.format(folder=place.folder, upstream=place.upstream, port=port))
    command = [binary, "-p", str(place.folder), "-e", "stderr", "-c", str(config)]
    program = await Program.start(command, core=place.core, log=place.folder / "nginx.log")
    await listening(program, port)
    return Running(program=program, endpoint=Endpoint(name="nginx", port=port))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def listening(program: Program, port: int, patience: float = 60.0) -> None:
    """Wait until it accepts connections; BenchFailed when it ends before or takes too long."""
    for _ in range(int(patience / 0.05)):
        if program.process.returncode is not None:
            break
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.05)
            continue
        writer.close()
        return
    raise BenchFailed(f"{program.log.stem} does not listen on its port{program.last_words()}")
=======
    # started by root, its worker would be another user, who may not read the bench's folder
    user = "user root;" if os.geteuid() == 0 else ""
    folder = place.folder / name
    folder.mkdir()
    config = folder / "nginx.conf"
    config.write_text(_NGINX.format(folder=folder, upstream=place.upstream, port=port, buffers=buffers, user=user))
    command = [binary, "-p", str(folder), "-e", "stderr", "-c", str(config)]
    program = await Program.start(command, core=place.core, log=place.folder / f"{name}.log")
    await listening(program, port)
    return Running(program=program, endpoint=Endpoint(name=name, port=port))
>>>>>>> 97b387fbd882dd22383392c0079d5c1661ee35d6


CONTENDERS = {
    one.name: one
    for one in (
<<<<<<< HEAD
        Contender(name="polynya", does="Anthropic in and out, capture, durable", start=_polynya),
        Contender(name="nginx", does="forwards", start=_nginx),
        Contender(name="pass", does="forwards, least Python", start=_pass),
=======
        Contender(name="polynya", does="whole hop, durable", start=_polynya),
        Contender(name="polynya-write", does="whole hop, no fsync", start=_polynya_write),
        Contender(name="nginx", does="forwards", start=_nginx),
        Contender(name="nginx-disk", does="forwards, own buffer sizes", start=_nginx_disk),
        Contender(name="pass", does="forwards, Python", start=_pass),
        *PEERS,
>>>>>>> 97b387fbd882dd22383392c0079d5c1661ee35d6
    )
}
