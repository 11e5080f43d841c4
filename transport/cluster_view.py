"""What the service tells of other nodes. kvstore.cluster has it; the server puts it in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.doctor import Report
    from kvstore.nodes import Deletion, DrainOrder, DrainProgress, Node, NodeMatch
    from kvstore.stats import NamespaceStats
    from kvstore.tokens import Tokens
    from kvstore.types import Namespace, Root


class ClusterView(Protocol):
    """The nodes of a cluster, as one of them sees them. Any thread may call."""

    @property
    def node_name(self) -> str:
        """What the node that is asked is called."""
        ...

    def nodes(self) -> Sequence[Node]:
        """The living nodes, and those that are gone; raises DirectoryUnavailableError."""
        ...

    def locate(self, namespace: Namespace, tokens: Tokens, root: Root | None) -> Sequence[NodeMatch]:
        """What each of them holds of a prompt, the most first; raises DirectoryUnavailableError."""
        ...


class Draining(Protocol):
    """What drains the node that is asked. Any thread may call."""

    @property
    def progress(self) -> DrainProgress:
        """How far it is."""
        ...

    def begin(self, order: DrainOrder) -> None:
        """Drain from now on, and hand over, unless that is under way; raises InvalidArgumentError."""
        ...

    def wait(self, seconds: float) -> DrainProgress:
        """Wait for the end of the hand-over, at most so long; how far it is then."""
        ...

    def undo(self) -> bool:
        """Take part again; false where it did not drain."""
        ...


class Deleting(Protocol):
    """What deletes namespaces here and on all nodes. Any thread may call."""

    def applied(self, ns_id: bytes) -> int:
        """The epoch of the last deletion of a namespace behind which nothing older can be read here; 0: none."""
        ...

    def delete(self, ns_id: bytes) -> Deletion:
        """Delete one; raises StorageError if a restart could bring it back."""
        ...


class Diagnosing(Protocol):
    """What says why prompts were not found. Any thread may call."""

    def report(self, tenant: str | None = None) -> Report:
        """What was seen; None stands for all tenants."""
        ...

    def reset(self) -> None:
        """Count anew."""
        ...


@runtime_checkable
class ListingStore(Protocol):
    """A store that knows its namespaces."""

    def namespaces(self) -> list[NamespaceStats]:
        """Those that are there, by id."""
        ...
