"""Whose failure was it? What another attempt may not meet is run again; what the node caused is held against the node."""

from __future__ import annotations

from polynya.schema import SessionResult, Status

_RETRIED_BOUNDARIES = {"capture", "engine", "runtime"}
_NODE_BOUNDARIES = {"capture", "engine"}
_NODE_KINDS = {"RuntimeUnavailable"}


def worth_a_retry(result: SessionResult) -> bool:
    """An infrastructure failure that may not happen again. How often is the task's ``retries``."""
    error = result.error
    return (
        result.status == Status.INFRA_ERROR
        and error is not None
        and (error.retryable or error.boundary in _RETRIED_BOUNDARIES)
    )


def node_is_to_blame(result: SessionResult) -> bool:
    """Its engine, disk or sandbox failed, so the next session there may fail too. A task that nobody can lay out is no node's fault."""
    error = result.error
    return (
        result.status == Status.INFRA_ERROR
        and error is not None
        and (error.boundary in _NODE_BOUNDARIES or error.kind in _NODE_KINDS)
    )
