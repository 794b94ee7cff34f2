"""The radix tree against a slow model that knows only which page holds which tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tidemill.scheduler.prefix_tree import Node, PrefixTree, encode_key
from tidemill.wire.plan import I32

PAGE = 3
Tokens = tuple[int, ...]
Content = tuple[str, Tokens]  # salt, all tokens from the start to the page's end

sequences = st.lists(st.integers(0, 2), min_size=1, max_size=14).map(tuple)
salts = st.sampled_from(["", "x"])


def key_of(tokens: Tokens) -> bytes:
    return encode_key(np.array(tokens, dtype=np.int32))


def common(a: Tokens, b: Tokens) -> int:
    length = 0
    while length < min(len(a), len(b)) and a[length] == b[length]:
        length += 1
    return length


def contents(tree: PrefixTree) -> dict[int, Content]:
    """What the tree says each of its pages holds."""
    found: dict[int, Content] = {}
    for node in tree.walk():
        above: list[bytes] = []
        at: Node = node
        while at.parent is not None:
            above.append(at.key)
            at = at.parent
        tokens = tuple(np.frombuffer(b"".join(reversed(above)), ">i4").tolist())
        start = len(tokens) - len(node.key) // 4 if node.parent is not None else 0
        for index, page in enumerate(node.pages.tolist()):
            end = min(start + (index + 1) * PAGE, len(tokens))
            found[page] = (at.key.decode(), tokens[:end])
    return found


class TreeMachine(RuleBasedStateMachine):
    """Random inserts, holds, drops and evictions."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = PrefixTree(PAGE)
        self.model: dict[int, Content] = {}
        self.used: dict[int, int] = {}  # page -> operation that used it last
        self.held: list[tuple[Node, Content]] = []
        self.next_page = 0
        self.operation = 0

    def locked(self, content: Content) -> bool:
        salt, tokens = content
        return any(
            salt == held_salt and held[: len(tokens)] == tokens
            for _, (held_salt, held) in self.held
        )

    def touch(self, salt: str, tokens: Tokens) -> None:
        self.operation += 1
        for page, (page_salt, held) in self.model.items():
            if page_salt == salt and tokens[: len(held)] == held:
                self.used[page] = self.operation

    def longest(self, salt: str, tokens: Tokens) -> int:
        return max(
            (common(tokens, held) for page_salt, held in self.model.values() if page_salt == salt),
            default=0,
        )

    @rule(tokens=sequences, salt=salts, from_root=st.booleans())
    def insert(self, tokens: Tokens, salt: str, from_root: bool) -> None:
        match = self.tree.match(b"" if from_root else key_of(tokens), salt, 1)
        whole = len(match.pages)
        count = -(-len(tokens) // PAGE)
        pages: I32 = np.arange(self.next_page, self.next_page + count, dtype=np.int32)
        self.next_page += count
        self.tree.lock(match.node)
        key = key_of(tokens[whole * PAGE :])
        _, unused = self.tree.insert(match.node, key, pages[whole:], 0)
        self.tree.unlock(match.node)

        expected_unused: list[int] = []
        added: list[int] = []
        for index in range(whole, count):
            content = tokens[: min((index + 1) * PAGE, len(tokens))]
            rivals = {
                page: held
                for page, (held_salt, held) in self.model.items()
                if held_salt == salt and index * PAGE < len(held) <= (index + 1) * PAGE
            }
            if any(held[: len(content)] == content for held in rivals.values()):
                expected_unused.append(int(pages[index]))
                continue
            for page, held in rivals.items():
                if content[: len(held)] == held:  # a shorter tail
                    expected_unused.append(page)
                    del self.model[page]
            self.model[int(pages[index])] = (salt, content)
            added.append(int(pages[index]))
        assert sorted(unused.tolist()) == sorted(expected_unused)
        self.touch(salt, tokens[: whole * PAGE])
        self.used.update(dict.fromkeys(added, self.operation))

    @rule(tokens=sequences, salt=salts, keep=st.booleans())
    def match(self, tokens: Tokens, salt: str, keep: bool) -> None:
        match = self.tree.match(key_of(tokens), salt, 1)
        self.tree.lock(match.node)
        whole = len(match.pages) * PAGE
        assert whole + match.tail == self.longest(salt, tokens)
        for index, page in enumerate(match.pages.tolist()):
            assert self.model[page] == (salt, tokens[: (index + 1) * PAGE])
        if match.tail:
            assert 0 < match.tail < PAGE
            source_salt, held = self.model[match.source]
            assert (source_salt, common(tokens, held)) == (salt, whole + match.tail)
        self.held.append((match.node, (salt, tokens[:whole])))
        if not keep:
            self.drop(-1)

    @precondition(lambda self: self.held)
    @rule(index=st.integers(0, 50))
    def drop(self, index: int) -> None:
        node, (salt, tokens) = self.held.pop(index % len(self.held))
        self.tree.unlock(node)
        self.touch(salt, tokens)

    @rule(count=st.integers(1, 8))
    def evict(self, count: int) -> None:
        expected: list[int] = []
        for _ in range(count):
            leaves = [
                (self.used[page], -len(tokens), page)
                for page, (salt, tokens) in self.model.items()
                if not self.locked((salt, tokens))
                and not any(
                    salt == other_salt
                    and len(other) > len(tokens)
                    and common(other, tokens) == len(tokens)
                    for other_salt, other in self.model.values()
                )
            ]
            if not leaves:
                break
            expected.append(min(leaves)[2])
            del self.model[expected[-1]]
        assert sorted(self.tree.evict(count).tolist()) == sorted(expected)

    @invariant()
    def tree_and_model_agree(self) -> None:
        assert contents(self.tree) == self.model
        assert self.tree.num_pages == len(self.model)
        free = sum(not self.locked(content) for content in self.model.values())
        assert self.tree.evictable == free


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_step_may_share_its_own_pages_but_not_copy_from_them() -> None:
    tree = PrefixTree(4)
    root = tree.match(b"", "", 7).node
    ids = np.arange(8, dtype=np.int32)
    tree.insert(root, encode_key(ids), np.array([5, 6], dtype=np.int32), filled=7)
    wanted = encode_key(ids[:7])
    same = tree.match(wanted, "", 7)
    assert (same.pages.tolist(), same.tail) == ([5], 0)
    later = tree.match(wanted, "", 8)
    assert (later.pages.tolist(), later.source, later.tail) == ([5], 6, 3)


def test_token_order_is_key_order() -> None:
    """Big-endian keys: the closest sibling is found next to where a key would go."""
    tree = PrefixTree(2)
    root = tree.match(b"", "", 0).node
    for page, first in enumerate([255, 256, 70_000, 1]):
        key = encode_key(np.array([first, 9], dtype=np.int32))
        tree.insert(root, key, np.array([page], dtype=np.int32), 0)
    for page, first in enumerate([255, 256, 70_000, 1]):
        found = tree.match(encode_key(np.array([first, 8], dtype=np.int32)), "", 1)
        assert (found.source, found.tail) == (page, 1)


def test_the_list_of_candidates_for_eviction_stays_small() -> None:
    tree = PrefixTree(2)
    tree.insert(
        tree.match(b"", "", 0).node,
        encode_key(np.array([1, 2], dtype=np.int32)),
        np.array([0], dtype=np.int32),
        0,
    )
    for step in range(1000):
        match = tree.match(encode_key(np.array([1, 2, 3], dtype=np.int32)), "", step)
        tree.lock(match.node)
        tree.unlock(match.node)
    assert len(tree._lru) < 100
    assert tree.evict(5).tolist() == [0]


def test_unused_salts_leave_nothing_behind() -> None:
    tree = PrefixTree(2)
    for tenant in range(50):
        match = tree.match(encode_key(np.array([1, 2], dtype=np.int32)), f"tenant {tenant}", 0)
        tree.lock(match.node)
        tree.unlock(match.node)
    assert list(tree.walk()) == []


def test_only_unlocked_leaves_can_be_removed() -> None:
    tree = PrefixTree(2)
    root = tree.match(b"", "", 0).node
    node, _ = tree.insert(
        root, encode_key(np.array([1, 2], dtype=np.int32)), np.array([0], dtype=np.int32), 0
    )
    tree.lock(node)
    assert tree.evict(1).tolist() == []
    with pytest.raises(ValueError, match="unlocked leaf"):
        tree._remove(node)
