"""The models of the benchmarks have about as many parameters as was asked, in shapes that make sense."""

import pytest

from instep.bench.variants import full_model
from instep.bench.workloads import MLPS, WORKLOADS, Workload, gpt_of_size, workload
from instep.models.config import num_parameters


@pytest.mark.parametrize("context", [64, 128, 1024])
def test_a_model_has_nearly_as_many_parameters_as_were_asked_for(context):
    params = 200_000
    while params < 10**9:
        made = gpt_of_size(params, context)
        assert num_parameters(made) == pytest.approx(params, rel=1 / 8), params
        assert made.layers == 10 and made.width / made.heads >= 20
        params = params * 11 // 10


@pytest.mark.parametrize(("params", "width"), [(5, 192), (20, 384), (50, 640), (70, 768)])
def test_the_sizes_of_the_benchmarks_have_heads_of_64(params, width):
    made = gpt_of_size(params * 10**6, 128)
    assert (made.width, made.width / made.heads) == (width, 64)


def test_a_model_may_have_many_thin_layers_or_few_wide_ones():
    thin, wide = (WORKLOADS[name].config for name in ("python", "matrices"))
    assert (thin.layers, wide.layers) == (24, 2)
    assert thin.width <= 32 and wide.width >= 512
    assert num_parameters(wide) == pytest.approx(WORKLOADS["matrices"].params, rel=1 / 8)


def test_a_model_that_would_be_narrower_than_16_is_refused():
    least = num_parameters(gpt_of_size(39_000, 128))
    assert gpt_of_size(least, 128).width == 16
    with pytest.raises(ValueError, match=rf"expected at least {least:,} parameters, got {least - 1:,}"):
        gpt_of_size(least - 1, 128)


@pytest.mark.parametrize(
    ("preset", "millions"), [("small", 124.4), ("medium", 354.8), ("large", 774.0), ("xl", 1557.6)]
)
def test_a_preset_has_the_size_that_was_published(preset, millions):
    published = Workload("a", 1, batch=1, what="a", tokens=1024, preset=preset, vocab=50257)
    assert published.gradient_bytes / 4e6 == pytest.approx(millions, abs=0.05)
    assert published.text.startswith(f"{preset}: ")
    assert "a vocabulary of 50,257" in published.text


def test_a_larger_vocabulary_leaves_less_for_the_blocks():
    made = gpt_of_size(20_000_000, 128, vocab=50257)
    assert num_parameters(made) == pytest.approx(20e6, rel=1 / 8)
    assert made.width < gpt_of_size(20_000_000, 128).width


def test_a_rank_has_what_it_keeps_and_the_activations_of_its_batch():
    one, two = (Workload("a", 200_000, batch=batch, what="a") for batch in (1, 2))
    assert one.rank_bytes(3) - one.rank_bytes(2) == one.gradient_bytes
    assert two.rank_bytes(0) == 2 * one.rank_bytes(0) > 0


@pytest.mark.parametrize("name", MLPS)
def test_an_mlp_has_the_size_that_it_is_called_by(name):
    chosen = WORKLOADS[name]
    made = sum(p.numel() for p in full_model(chosen.model).parameters())
    assert made == chosen.num_parameters == chosen.gradient_bytes / 4
    assert f"mlp-{made / 1e6:.2g}M" == chosen.name == name
    assert chosen.text == f"an MLP of {made / 1e6:.2g} M parameters, 32 vectors per rank"


def test_the_published_settings_have_seventy_million_parameters():
    for name in ("communication", "compute"):
        assert WORKLOADS[name].gradient_bytes == pytest.approx(280e6, rel=0.05)
    assert workload("compute", 1_000_000).batch == WORKLOADS["compute"].batch
