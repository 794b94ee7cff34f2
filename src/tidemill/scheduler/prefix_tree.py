"""A radix tree over token ids whose edges carry KV pages (SGLang's RadixAttention, Zheng et al.
2023), shared by page and reusable to the token.

An edge is a run of tokens and the pages that hold their KV. Nodes begin at page boundaries, so
a page belongs to one node. An edge may end inside a page (a finished request's tail); such a
node has no children, and its last page serves only as the source of a copy.

Token ids are compared as big-endian bytes: byte order is then token order, so among siblings
kept sorted, the one that shares most with a wanted key lies next to where that key would go.
One bisection finds both the child to descend to and the best page to copy from.

`refs` counts the running requests whose path goes through a node: a node with refs > 0 is never
evicted. Eviction takes the least recently used leaf, from its end.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tidemill.wire.plan import EMPTY, I32

TOKEN_BYTES = 4


def encode_key(ids: I32) -> bytes:
    """Token ids as the tree compares them."""
    return ids.astype(">i4").tobytes()


class Node:
    """An edge and the branches at its end."""

    __slots__ = (
        "child_keys",
        "children",
        "filled",
        "key",
        "last_used",
        "pages",
        "parent",
        "refs",
        "serial",
    )

    def __init__(
        self, key: bytes, pages: I32, parent: Node | None, filled: int, serial: int
    ) -> None:
        self.key = key
        self.pages = pages
        self.parent = parent  # None: a root, or evicted
        self.filled = filled  # the step that writes the last of the KV
        self.serial = serial
        self.refs = 0
        self.last_used = 0
        self.child_keys: list[bytes] = []  # first page of each child's key, sorted
        self.children: list[Node] = []  # in the order of child_keys


@dataclass(slots=True)
class Match:
    """The longest cached prefix of a key: whole pages down to `node`, then `tail` tokens that
    agree with the page `source`, the first page of `source_node`."""

    node: Node
    pages: I32
    source_node: Node | None = None
    source: int = -1
    tail: int = 0


class PrefixTree:
    """Cached prefixes, one root for each salt."""

    def __init__(self, page_size: int) -> None:
        self._page_bytes = page_size * TOKEN_BYTES
        self._roots: dict[str, Node] = {}
        self._lru: list[tuple[int, int, Node]] = []  # (last_used, serial, leaf); may be stale
        self._clock = 0
        self._serial = 0
        self._nodes = 0
        self.num_pages = 0
        self.evictable = 0  # pages of nodes with refs == 0

    # --- lookup -----------------------------------------------------------------------------

    def match(self, key: bytes, salt: str, step: int) -> Match:
        """The longest cached prefix of `key`. Splits a node where the match ends inside it.

        Whole pages may be filled by `step` itself (a row attends after all K and V of its step
        are written); the page to copy from must be older (copies run first).
        """
        node = self._root(salt)
        pages: list[I32] = []
        at = 0
        while True:
            child, common = self._closest_child(node, key, at)
            if child is None:
                return Match(node, _concatenate(pages))
            whole = common - common % self._page_bytes
            if whole:
                node = child if whole == len(child.key) else self._split(child, whole)
                pages.append(node.pages)
                at += whole
            if node is child:
                continue
            tail = (common - whole) // TOKEN_BYTES
            if tail and child.filled < step:
                return Match(node, _concatenate(pages), child, int(child.pages[0]), tail)
            return Match(node, _concatenate(pages))

    def has_child(self, node: Node, key: bytes) -> bool:
        """Whether some child of `node` begins with the first page of `key`."""
        probe = key[: self._page_bytes]
        at = bisect_left(node.child_keys, probe)
        return at < len(node.child_keys) and node.child_keys[at] == probe

    # --- growth -----------------------------------------------------------------------------

    def insert(self, node: Node, key: bytes, pages: I32, filled: int) -> tuple[Node, I32]:
        """Append `key` and its pages below `node`. Only its last page may be partly filled.

        Returns the node where the key's last token lies, and the pages that the tree did not
        take because it has the same tokens already; these stay the caller's.
        """
        unused: list[I32] = []
        while key:
            child, common = self._closest_child(node, key, 0)
            whole = common - common % self._page_bytes
            if child is not None and whole:
                node = child if whole == len(child.key) else self._split(child, whole)
                count = whole // self._page_bytes
                unused.append(pages[:count])
                key, pages = key[whole:], pages[count:]
                continue
            if child is not None and common == len(key):
                return child, _concatenate([*unused, pages])  # a tail that a longer page covers
            if child is not None and common == len(child.key) and not child.refs:
                unused.append(self._remove(child))  # a tail that the new page covers
            node = self._attach(node, key, pages, filled)
            break
        return node, _concatenate(unused)

    # --- reference counts -------------------------------------------------------------------

    def lock(self, node: Node) -> None:
        """Keep `node` and all above it from eviction."""
        at: Node | None = node
        while at is not None:
            if not at.refs:
                self.evictable -= len(at.pages)
            at.refs += 1
            at = at.parent

    def extend_lock(self, parent: Node, child: Node) -> None:
        """Move a lock on `parent` down to its new `child`."""
        if child.parent is not parent:
            raise ValueError("a lock moves from a node to its own child")
        if not child.refs:
            self.evictable -= len(child.pages)
        child.refs += 1

    def unlock(self, node: Node) -> None:
        """Undo `lock`; the path counts as used now."""
        self._clock += 1
        at: Node | None = node
        while at is not None:
            at.refs -= 1
            at.last_used = self._clock
            if not at.refs:
                self.evictable += len(at.pages)
            at = at.parent
        self._offer(node)

    # --- eviction ---------------------------------------------------------------------------

    def evict(self, count: int) -> I32:
        """Give up `count` pages (fewer if fewer are evictable), least recently used first."""
        freed: list[I32] = []
        while count and self._lru:
            entry = heapq.heappop(self._lru)
            node = entry[2]
            if not self._is_current(entry):
                continue
            if len(node.pages) > count:
                freed.append(self._trim(node, len(node.pages) - count))
                heapq.heappush(self._lru, entry)
                break
            parent = node.parent
            freed.append(self._remove(node))
            count -= len(freed[-1])
            if parent is not None:
                self._offer(parent)
        return _concatenate(freed)

    # --- inspection -------------------------------------------------------------------------

    def walk(self) -> Iterator[Node]:
        """All nodes, roots included, parents first."""
        todo = list(self._roots.values())
        while todo:
            node = todo.pop()
            yield node
            todo.extend(node.children)

    # --- internals --------------------------------------------------------------------------

    def _root(self, salt: str) -> Node:
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = Node(salt.encode(), EMPTY, None, 0, self._next_serial())
        return root

    def _closest_child(self, node: Node, key: bytes, at: int) -> tuple[Node | None, int]:
        """The child that shares most with key[at:], and the length in bytes that it shares."""
        if at >= len(key) or not node.children:
            return None, 0
        right = bisect_left(node.child_keys, key[at : at + self._page_bytes])
        best: Node | None = None
        most = 0
        for index in (right, right - 1):
            if 0 <= index < len(node.children):
                common = _common_prefix(key, at, node.children[index].key)
                if common > most:
                    best, most = node.children[index], common
        return best, most

    def _attach(self, parent: Node, key: bytes, pages: I32, filled: int) -> Node:
        node = Node(key, pages, parent, filled, self._next_serial())
        first = key[: self._page_bytes]
        at = bisect_left(parent.child_keys, first)
        parent.child_keys.insert(at, first)
        parent.children.insert(at, node)
        self._clock += 1
        node.last_used = self._clock
        self._nodes += 1
        self.num_pages += len(pages)
        self.evictable += len(pages)
        self._offer(node)
        return node

    def _split(self, lower: Node, cut: int) -> Node:
        """Divide a node `cut` bytes down its edge; returns the new upper half.

        The lower half stays the same object: requests that lock it hold the whole path still.
        """
        count = cut // self._page_bytes
        upper = Node(
            lower.key[:cut], lower.pages[:count], lower.parent, lower.filled, self._next_serial()
        )
        upper.refs, upper.last_used = lower.refs, lower.last_used
        upper.children = [lower]
        upper.child_keys = [lower.key[cut : cut + self._page_bytes]]
        if lower.parent is None:
            raise ValueError("a root has no edge to split")
        siblings = lower.parent
        siblings.children[bisect_left(siblings.child_keys, lower.key[: self._page_bytes])] = upper
        lower.key, lower.pages, lower.parent = lower.key[cut:], lower.pages[count:], upper
        self._nodes += 1
        return upper

    def _trim(self, node: Node, keep: int) -> I32:
        """Cut an unlocked leaf's pages from `keep` on."""
        pages = node.pages[keep:]
        node.key, node.pages = node.key[: keep * self._page_bytes], node.pages[:keep]
        self.num_pages -= len(pages)
        self.evictable -= len(pages)
        return pages

    def _remove(self, node: Node) -> I32:
        """Take an unlocked leaf out of the tree; returns its pages."""
        parent = node.parent
        if parent is None or node.refs or node.children:
            raise ValueError("only an unlocked leaf can be removed")
        at = bisect_left(parent.child_keys, node.key[: self._page_bytes])
        del parent.child_keys[at], parent.children[at]
        node.parent = None
        self._nodes -= 1
        self.num_pages -= len(node.pages)
        self.evictable -= len(node.pages)
        return node.pages

    def _offer(self, node: Node) -> None:
        """A node may have become an unlocked leaf: remember it for eviction."""
        if node.refs or node.children:
            return
        if node.parent is None:  # a root with nothing below it
            self._roots.pop(node.key.decode(), None)
            return
        heapq.heappush(self._lru, (node.last_used, node.serial, node))
        if len(self._lru) > 2 * self._nodes + 64:  # mostly stale entries
            self._lru = [entry for entry in self._lru if self._is_current(entry)]
            heapq.heapify(self._lru)

    @staticmethod
    def _is_current(entry: tuple[int, int, Node]) -> bool:
        last_used, _, node = entry
        return (
            not (node.refs or node.children)
            and node.parent is not None
            and (node.last_used == last_used)
        )

    def _next_serial(self) -> int:
        self._serial += 1
        return self._serial


def _common_prefix(key: bytes, at: int, edge: bytes) -> int:
    """How many bytes key[at:] and `edge` share, in whole tokens."""
    length = min(len(key) - at, len(edge))
    if key.startswith(edge[:length], at):
        return length
    ours = np.frombuffer(key, np.int32, length // TOKEN_BYTES, at)
    theirs = np.frombuffer(edge, np.int32, length // TOKEN_BYTES)
    return int((ours != theirs).argmax()) * TOKEN_BYTES


def _concatenate(parts: list[I32]) -> I32:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else EMPTY
