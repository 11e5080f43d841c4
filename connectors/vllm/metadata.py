"""The connector's messages in the classes that vLLM carries between its scheduler and its workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvstore.connectors.vllm.plan import StepPlan

if TYPE_CHECKING:
    from kvstore.connectors.vllm.soundness import Soundness


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM has no types here
    """What the workers are to do in a step."""

    plan: StepPlan = field(default_factory=StepPlan)


@dataclass
class WorkerState(KVConnectorWorkerMetadata):  # type: ignore[misc]  # vLLM has no types here
    """What workers know of the server, and what became of loads by layer: those of this step, and failures so far."""

    soundness: Soundness
    loaded_in_step: frozenset[str] = frozenset()
    failures: int = 0

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """The worst that any of them found."""
        ended = self.loaded_in_step | other.loaded_in_step
        return WorkerState(max(self.soundness, other.soundness), ended, max(self.failures, other.failures))
