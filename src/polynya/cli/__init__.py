"""One file a verb. A verb parses options, calls one room below and prints; it decides nothing about data.

Exit codes: 0 all sessions finished · 1 the run ended, some sessions are infra_error · 2 bad input · 3 a part is missing or
does not work (engine, harness, runtime, port) · 4 the engine gives no ids or logprobs · 5 storage failed · 130 interrupted.
"""
