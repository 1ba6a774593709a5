"""polynya, and what it is measured against first: nginx and a plain pass-through. The others are in ``peers``."""

from __future__ import annotations

import os
import shutil

import msgspec

from polynya.bench.hosted import Hosting
from polynya.bench.load import Endpoint
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
    )
    ready = await program.read()
    if not ready["trainable"]:
        raise BenchFailed("the gateway finds the mock upstream not trainable")
    endpoint = Endpoint(name=name, port=ready["port"], dialect="anthropic", paths=tuple(ready["paths"]))
    return Running(program=program, endpoint=endpoint)


async def _pass(place: Place) -> Running:
    program = await Program.module("passing", str(place.upstream), core=place.core, log=place.folder / "pass.log")
    return Running(program=program, endpoint=Endpoint(name="pass", port=(await program.read())["port"]))


_NGINX = """
daemon off;
worker_processes 1;
{user}
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
  {buffers}
  keepalive_requests 100000000;
  upstream engine {{ server 127.0.0.1:{upstream}; keepalive 1024; keepalive_requests 100000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=2048;
    location / {{
      proxy_pass http://engine;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_read_timeout 600s;
    }}
  }}
}}
"""


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
    binary = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
    if binary is None:
        raise Missing("not installed; apt-get install nginx")
    port = free_port()
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


CONTENDERS = {
    one.name: one
    for one in (
        Contender(name="polynya", does="whole hop, durable", start=_polynya),
        Contender(name="polynya-write", does="whole hop, no fsync", start=_polynya_write),
        Contender(name="nginx", does="forwards", start=_nginx),
        Contender(name="nginx-disk", does="forwards, own buffer sizes", start=_nginx_disk),
        Contender(name="pass", does="forwards, Python", start=_pass),
        *PEERS,
    )
}
