"""The reference selects what DSA selects, whatever the lengths and whatever lies in the padding."""

import pytest
import torch
from seatrial_kernels.sparse_attention import reference
from seatrial_kernels.sparse_attention.reference import GROUP, KEY_DTYPES, WINDOW

HEADS, CHANNELS, DIM, TOPK = 4, 16, 32, 64


@pytest.fixture
def draw() -> torch.Generator:
    """Return the one source of random numbers, seeded."""
    return torch.Generator().manual_seed(7)


def sequence(draw: torch.Generator, tokens: int) -> tuple[torch.Tensor, ...]:
    """Return queries [T, H, C], keys [T, C], values [T, C] and a projection [D, C]."""
    return (
        torch.randn(tokens, HEADS, CHANNELS, generator=draw),
        torch.randn(tokens, CHANNELS, generator=draw),
        torch.randn(tokens, CHANNELS, generator=draw),
        torch.randn(DIM, CHANNELS, generator=draw),
    )


def seen(
    queries: torch.Tensor,
    keys: torch.Tensor,
    projection: torch.Tensor,
    positions: torch.Tensor,
    topk: int = TOPK,
) -> torch.Tensor:
    """Return the allowed tokens [R, T] of the queries [R, H, C] at their positions, fp32 keys."""
    complete = len(keys) // GROUP * GROUP
    stored = reference.index_keys(keys[:complete], projection, torch.float32)
    scores = reference.index_scores(queries, projection, stored)
    selected = torch.empty((len(queries), topk), dtype=torch.int64)
    reference.select_entries(scores, positions, out=selected)
    return reference.allowed_tokens(selected, positions, len(keys))


def causal(positions: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return the mask of dense attention."""
    return torch.arange(tokens) <= positions[:, None]


def test_a_score_is_the_product_of_the_summed_query_and_the_mean_key(draw: torch.Generator) -> None:
    """Score = (W sum_h q_h) . (W mean k), written out with loops in float64."""
    queries, keys, _, projection = sequence(draw, 3 * GROUP)
    stored = reference.index_keys(keys, projection, torch.float32)
    scores = reference.index_scores(queries, projection, stored)
    for r in range(len(queries)):
        for n in range(3):
            query = projection.double() @ sum(queries[r, h].double() for h in range(HEADS))
            mean = sum(keys[GROUP * n + i].double() for i in range(GROUP)) / GROUP
            assert scores[r, n].item() == pytest.approx(
                (query @ (projection.double() @ mean)).item(), rel=1e-4, abs=1e-3
            )


@pytest.mark.parametrize("dtype", KEY_DTYPES)
def test_a_key_is_rounded_to_its_dtype_and_saturates(dtype: str) -> None:
    """What is stored is the nearest number of the dtype; e4m3 loses what is below 2 ** -10."""
    projection = torch.eye(CHANNELS)
    keys = torch.zeros(GROUP, CHANNELS)
    keys[:, 0], keys[:, 1], keys[:, 2] = 1.0, 2.0**-11, 1e30
    stored = reference.index_keys(keys, projection, KEY_DTYPES[dtype])[0].float()
    assert stored[0] == 1.0
    assert stored[1] == (0.0 if dtype == "fp8_e4m3" else 2.0**-11)
    assert stored.isfinite().all()


@pytest.mark.parametrize("tokens", [1, GROUP - 1, GROUP, GROUP + 1, 1000, 1003])
def test_nothing_later_is_seen(draw: torch.Generator, tokens: int) -> None:
    """No query sees a token after it, nor an entry that is not complete where it stands."""
    queries, keys, _, projection = sequence(draw, tokens)
    positions = torch.arange(tokens)
    allowed = seen(queries, keys, projection, positions, topk=8)
    assert not (allowed & ~causal(positions, tokens)).any()
    assert allowed.diagonal().all()


@pytest.mark.parametrize("entries", [0, 1, TOPK - 1, TOPK])
@pytest.mark.parametrize("rest", range(GROUP))
def test_everything_is_seen_while_there_are_no_more_entries_than_topk(
    draw: torch.Generator, entries: int, rest: int
) -> None:
    """Up to topk complete entries, sparse attention is dense attention."""
    tokens = GROUP * entries + rest
    if tokens == 0:
        return
    queries, keys, _, projection = sequence(draw, tokens)
    positions = torch.arange(tokens)
    assert seen(queries, keys, projection, positions).equal(causal(positions, tokens))


def test_beyond_topk_the_best_entries_and_the_window_are_seen(draw: torch.Generator) -> None:
    """With topk + 1 entries outside the window exactly the worst-scoring one is dropped."""
    tokens = GROUP * (TOPK + 1)
    queries, keys, _, projection = sequence(draw, tokens)
    positions = torch.tensor([tokens - 1])
    stored = reference.index_keys(keys, projection, torch.float32)
    scores = reference.index_scores(queries[-1:], projection, stored)
    worst = int(scores.argmin())
    dropped = torch.zeros(tokens, dtype=torch.bool)
    dropped[GROUP * worst : GROUP * worst + GROUP] = True
    dropped[-WINDOW:] = False
    allowed = seen(queries[-1:], keys, projection, positions)
    assert allowed[0].equal(~dropped)


@pytest.mark.parametrize("tokens", [1, WINDOW, 1000, 1003])
def test_a_batch_selects_as_single_queries_do(draw: torch.Generator, tokens: int) -> None:
    """Rows do not influence one another."""
    queries, keys, _, projection = sequence(draw, tokens)
    positions = torch.arange(tokens)
    batch = seen(queries, keys, projection, positions, topk=8)
    for r in range(0, tokens, 97):
        single = seen(queries[r : r + 1], keys, projection, positions[r : r + 1], topk=8)
        assert single[0].equal(batch[r]), f"row {r} of {tokens}"


def test_a_shorter_sequence_sees_the_same(draw: torch.Generator) -> None:
    """A query's selection does not depend on tokens after it (chunks and P/D rely on it)."""
    queries, keys, _, projection = sequence(draw, 1000)
    whole = seen(queries, keys, projection, torch.arange(1000), topk=8)
    part = seen(queries[:600], keys[:600], projection, torch.arange(600), topk=8)
    assert part.equal(whole[:600, :600])


def test_nan_in_entries_that_are_not_visible_changes_nothing(draw: torch.Generator) -> None:
    """Rows of the pool that nobody has written yet may hold anything."""
    queries, keys, _, projection = sequence(draw, 800)
    positions = torch.arange(400, 500)
    stored = reference.index_keys(keys, projection, torch.float32)
    results = []
    for poison in (0.0, torch.nan):
        stored[125:] = poison
        scores = reference.index_scores(queries[400:500], projection, stored)
        selected = torch.empty((100, 16), dtype=torch.int64)
        reference.select_entries(scores, positions, out=selected)
        results.append(selected.sort().values)
    assert results[0].equal(results[1])
    assert results[0].max() < 125


def test_attention_is_softmax_over_the_allowed_tokens(draw: torch.Generator) -> None:
    """Against the formula in float64."""
    queries, keys, values, _ = sequence(draw, 50)
    allowed = causal(torch.arange(50), 50)
    allowed[40:, 3:20] = False
    found = reference.attention(queries, keys[:, None], values[:, None], allowed, 0.25)
    logits = torch.einsum("rhc,tc->rht", queries.double(), keys.double()) * 0.25
    weights = logits.masked_fill(~allowed[:, None], -torch.inf).softmax(dim=-1)
    assert found.double() == pytest.approx(weights @ values.double(), abs=1e-5)


def test_the_same_twice_is_the_same_to_the_bit(draw: torch.Generator) -> None:
    """No atomics, no races: a second run repeats the first."""
    queries, keys, _, projection = sequence(draw, 1000)
    positions = torch.arange(1000)
    first = seen(queries, keys, projection, positions, topk=8)
    assert seen(queries, keys, projection, positions, topk=8).equal(first)
