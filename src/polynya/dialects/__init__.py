"""One module a dialect: parse(bytes) → neutral request; render(reply) → bytes; stream(reply) → SSE; error(…).

Pure: no I/O, no clock, no third-party package but msgspec, numpy and xxhash.
"""
