"""A tree of names: whoever follows the changes knows the state, from wherever they begin."""

from hypothesis import given
from hypothesis import strategies as st

from services.name_resolve.store import Changes, CreatedAt, Delete, Item, Put, Unchanged, View, Write
from services.name_resolve.tree import Leases, Tree

KEYS = ["a/", "a/b/", "a/c/", "ab/", "d/"]
writes = st.one_of(
    st.builds(Put, st.sampled_from(KEYS), st.binary(max_size=2), st.sampled_from([0, 0, 7, 8])),
    st.builds(Delete, st.sampled_from(KEYS), st.booleans()),
)
steps = st.lists(st.one_of(writes, st.sampled_from([7, 8])), max_size=30)


def apply(tree: Tree, step: Write | int) -> None:
    if isinstance(step, int):
        tree.drop_leases({step})
    else:
        tree.transact([], [step])


def follow(known: dict[str, Item], news: View | Changes) -> None:
    """What a watcher does with what it is told."""
    if isinstance(news, View):
        known.clear()
        known.update({item.key: item for item in news.items})
        return
    for change in news.changes:
        if change.item is None:
            del known[change.key]  # a key that is told to be gone was known
        else:
            known[change.key] = change.item


@given(before=steps, after=steps, prefix=st.sampled_from(["", "a/", "ab/"]))
def test_a_view_and_the_changes_after_it_are_the_later_view(
    before: list[Write | int], after: list[Write | int], prefix: str
) -> None:
    tree = Tree()
    for step in before:
        apply(tree, step)
    view = tree.below(prefix)
    known = {item.key: item for item in view.items}
    for step in after:
        apply(tree, step)
    news = tree.changes_after(view.revision, prefix)
    if news is not None:
        assert news.revision == tree.revision
        follow(known, news)
    assert known == {item.key: item for item in tree.below(prefix).items}


@given(before=steps, after=steps)
def test_what_is_forgotten_is_told_as_a_view(before: list[Write | int], after: list[Write | int]) -> None:
    tree = Tree()
    for step in before:
        apply(tree, step)
    start = tree.revision
    tree.history = type(tree.history)(tree.history, maxlen=3)
    tree.forgotten = max(tree.forgotten, start - 3)
    for step in after:
        apply(tree, step)
    news = tree.changes_after(start, "")
    missed = tree.revision - start
    assert (news is None) == (missed == 0)
    assert isinstance(news, View) == (missed > 3)


@given(taken=steps)
def test_revisions_count_what_changed_and_nothing_else(taken: list[Write | int]) -> None:
    tree = Tree()
    for step in taken:
        before, revision = dict(tree.items), tree.revision
        apply(tree, step)
        assert tree.revision - revision == (isinstance(step, Put) or tree.items != before)
        for item in tree.items.values():
            assert item.create_revision <= item.revision <= tree.revision


def test_guards_tell_absent_changed_and_created_again_apart() -> None:
    tree = Tree()
    assert tree.transact([Unchanged("k/", 0)], [Put("k/", b"1")]).committed
    created = tree.revision
    refused = tree.transact([Unchanged("k/", 0)], [Put("k/", b"2")])
    assert (refused.committed, [item.value for item in refused.found]) == (False, [b"1"])
    tree.transact([], [Put("k/", b"2")])
    assert tree.transact([CreatedAt("k/", created), Unchanged("k/", tree.revision)], []).committed
    tree.transact([], [Delete("k/")])
    tree.transact([], [Put("k/", b"3")])
    assert not tree.transact([CreatedAt("k/", created)], []).committed


def test_a_copy_goes_its_own_way() -> None:
    tree = Tree()
    tree.transact([], [Put("k/", b"1")])
    other = tree.copy()
    other.transact([], [Delete("k/")])
    assert [item.value for item in tree.get("k/").items] == [b"1"]
    assert tree.changes_after(tree.revision, "") is None


def test_a_lease_lapses_at_its_time_unless_it_was_kept() -> None:
    leases = Leases()
    kept, silent = leases.grant(2.0, now=0.0), leases.grant(2.0, now=0.0)
    assert leases.keep_alive(kept, now=1.5) == 2.0
    assert leases.lapsed(now=2.1) == [silent]
    assert leases.lapsed(now=3.6) == [kept, silent]
