"""What modules have computed of one owner, each for itself, for as long as the owner lives."""

from typing import Any, Generic, Protocol, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Memos:
    """The place for it in an owner; only a `Memo` looks inside.

    It is here and not in modules, as values may refer to their owner: both go together.
    """

    __slots__ = ("__weakref__", "_by_memo")

    def __init__(self) -> None:
        self._by_memo: dict[Memo[Any, Any], dict[Any, Any]] = {}


class HasMemos(Protocol):
    """An owner."""

    @property
    def memos(self) -> Memos: ...


class Memo(Generic[K, V]):
    """One module's own dictionary per owner, declared at its head under a private name."""

    def of(self, owner: HasMemos) -> dict[K, V]:
        """Gives the owner's dictionary; empty at first, the same one ever after."""
        parts = owner.memos._by_memo
        found = parts.get(self)
        if found is None:
            found = parts[self] = {}
        return found
