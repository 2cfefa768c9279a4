"""Attention in any spelling is found in models that nobody wrote for ringopt, and their numbers stay.

A sample of them runs with the suite; `-m zoo` runs all and ends with a table.
"""

from __future__ import annotations

import pytest
import torch
from rich.console import Console

from ringopt.errors import RingMismatchError
from ringopt.passes import UNDERSTAND
from ringopt.tools.benchmarks.models.spellings import FORMS, LOOKALIKES, Spelled, inputs
from tests.harness.capturing import after
from tests.harness.translation import TOLERANCE, validate
from tests.zoo import TRUTH, build, family, missing, names
from tests.zoo.outcomes import RANDOM, Outcome, Totals, outcome, table

# Two ranks but where a number stands; lengths are no other size of the models, and not all even.
SAMPLE = {
    "hand/nano_matmul_div": (21, 2),
    "hand/nano_einsum_blhd": (23, 2),
    "hand/nano_baddbmm_causal": (21, 2),
    "hand/nano_causal_and_padding": (37, 3),
    "hand/nano_alibi": (21, 2),
    "hand/nano_window": (38, 2),
    "hand/nano_gqa_repeat_interleave": (21, 2),
    "hand/nano_learned_bias": (22, 2),
    "hand/nano_nan_to_num": (21, 2),
    "hand/nano_sdpa_gqa_flag": (21, 2),
    "hand/nano_single_head_3d": (21, 2),
    "nn/nn_mha_weights": (21, 2),
    "nn/nn_mha_padding": (21, 2),
    "nn/nn_decoder": (21, 2),
    "nn/nn_encoder_seqfirst": (21, 2),
    "hf/bert@eager": (21, 2),
    "hf/llama_pad@eager": (23, 2),
    "hf/mistral@sdpa": (35, 2),
    "hf/gemma2@eager": (21, 2),
    "hf/llama4_text@eager": (37, 2),
    "hf/gpt_oss@eager": (35, 2),
    "hf/mpt@eager": (21, 2),
    "hf/umt5@eager": (21, 2),
    "hf/modernbert@eager": (22, 2),
    "hf/deberta@eager": (21, 2),
    "hf/perceiver@eager": (21, 2),
    "hf/deit@sdpa": (25, 2),
    "hf/wav2vec2@eager": (21, 2),
    "hf/segformer@eager": (21, 2),
    "hf/swin@eager": (21, 2),
    "timm/vit_relpos@eager": (25, 2),
    "diffusers/pixart@eager": (25, 2),
    "xt/sparse_topk": (21, 2),
    "vitp/vit": (25, 2),
    "hand/neg_linear_elu": (21, 2),
    "hand/neg_xca_channel": (21, 2),
    "hand/neg_softmax_queries_axis": (21, 2),
    "hand/neg_relu_attention": (21, 2),
    "hand/neg_retention": (21, 2),
    "hand/neg_attn_weights_used": (21, 2),
}
REFUSED = {
    "xt/sparse_topk": "the mask is made of the scores themselves, by topk",
}
EXPORTED = [
    "hand/nano_causal_and_padding",
    "nn/nn_decoder",
    "hf/llama_pad@eager",
    "timm/vit_relpos@eager",
    "diffusers/pixart@eager",
]
SWEPT = 37  # tokens; 2 ranks

# Models whose attention is rewritten and where something has to be gathered all the same, so that less than SHARE of
# the work stays on shards.
FEWER = {
    "hf/deberta": "each query reads of every key's scores with places, so every rank has these whole",
    "hf/informer": "the queries that matter are picked by their scores",
    "vitp/local_attention_tf": "every rank computes what stands before the rows that are padded and cut into windows",
    "timm/swinv2_cr": "a network of 384 makes the bias of each layer, from all pairs of places in a window",
    **dict.fromkeys(
        ("hf/ctrl", "hf/llava", "hf/switch_transformers", "hf/reformer"),
        "each graph that Dynamo alone makes of it stands by itself here; on ranks rows cross, or it is one graph",
    ),
}
# What is a recurrence: a scan found anywhere else is none.
RECURRENT = ("hf/recurrent_gemma",)


def needs(name: str) -> None:
    if missing(family(name)):
        pytest.skip(missing(family(name)))


def spread_or_known(found: Outcome) -> bool:
    return not found.rewritten or found.is_spread or found.name.partition("@")[0] in FEWER


# ---- the sample ----------------------------------------------------------------------------------------------------


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", SAMPLE)
def test_sample(name):
    needs(name)
    length, p = SAMPLE[name]
    found = outcome(name, length, p)
    assert not found.wrong
    assert spread_or_known(found), found.report
    if found.is_negative:
        assert found.rewritten == 0
    else:
        assert len(found.report.sites) == found.eligible, found.report
        refused = [reason for reason in found.refusals if name not in REFUSED or REFUSED[name] not in reason]
        assert not refused, found.report


def test_the_sample_has_every_kind():
    """Of the spellings, masks and packages in the zoo."""
    for facts in ("forms", "masks"):
        kinds = {kind for truth in TRUTH.values() if truth.eligible for kind in getattr(truth, facts)}
        assert {kind for name in SAMPLE for kind in getattr(TRUTH[name], facts)} >= kinds
    assert {family(name) for name in SAMPLE} == {family(name) for name in TRUTH}
    assert any(TRUTH[name].cross for name in SAMPLE)


# ---- forms ---------------------------------------------------------------------------------------------------------


def sites(module, *args):
    _, context = after(UNDERSTAND, module, *args, ranks=2)
    return list(context.sites.values()), [refusal.sentence for refusal in context.left_alone]


def by_turns(turn):
    """Every second form, from `turn` on; with -m zoo the others."""
    return [
        pytest.param(name, marks=[] if number % 2 == turn else [pytest.mark.zoo]) for number, name in enumerate(FORMS)
    ]


@pytest.mark.parametrize("name", by_turns(0))
def test_every_form_is_found_in_inference(name):
    with torch.no_grad():
        found, left_alone = sites(Spelled(name).eval(), *inputs(name, requires_grad=False))
    assert len(found) == 1 and not left_alone


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", [name for name in FORMS if not FORMS[name].dropout])
def test_every_form_is_found_in_training_and_exact(name):
    tolerance = 1e-6 if FORMS[name].in_float32 else TOLERANCE
    verdict = validate(2, Spelled(name).train(), *inputs(name), tolerance=tolerance)
    assert not verdict.wrong
    assert len(verdict.report.sites) == 1 and not verdict.report.left_alone


@pytest.mark.parametrize("name", [name for name in FORMS if FORMS[name].dropout])
def test_forms_with_dropout_are_found_in_training(name):
    found, left_alone = sites(Spelled(name).train(), *inputs(name))
    assert len(found) == 1 and not left_alone


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", by_turns(1))
def test_every_form_is_found_in_an_exported_program(name):
    given = inputs(name)
    exported = torch.export.export(Spelled(name).train(), tuple(given)).module()
    found, left_alone = sites(exported, *given)
    assert len(found) == 1 and not left_alone


@pytest.mark.parametrize("name", LOOKALIKES)
def test_lookalikes_are_left_alone_with_a_reason(name):
    found, left_alone = sites(Spelled(name), *inputs(name))
    assert not found and len(left_alone) == 1


def test_how_many_forms():
    fused = [form for form in FORMS.values() if form.fused]
    assert (len(FORMS) - len(fused), len(fused), len(LOOKALIKES)) == (26, 2, 4)


# ---- exported programs ---------------------------------------------------------------------------------------------


def same_sites_when_exported(name):
    needs(name)
    module, keywords = build(name, SAMPLE[name][0])
    exported = torch.export.export(module, (), keywords).module()
    found, _ = sites(exported, keywords)
    assert len(found) == TRUTH[name].eligible


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", EXPORTED)
def test_exported_models_have_the_same_sites(name):
    same_sites_when_exported(name)


@pytest.mark.zoo
@pytest.mark.parametrize("name", [name for name in SAMPLE if TRUTH[name].eligible and name not in EXPORTED])
def test_the_rest_of_the_sample_exported(name):
    same_sites_when_exported(name)


# ---- everything ----------------------------------------------------------------------------------------------------

OUTCOMES: dict[str, Outcome] = {}
ERRORS: dict[str, str] = {}


@pytest.mark.zoo
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", names())
def test_sweep(name):
    needs(name)
    try:
        OUTCOMES[name] = found = outcome(name, SWEPT, 2, also_float32=True)
    except RingMismatchError:
        if name in RANDOM:  # ranks that are threads draw from one stream, by turns
            pytest.skip(RANDOM[name])
        raise
    except Exception as error:
        ERRORS[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        raise
    assert not found.wrong
    assert spread_or_known(found), found.report
    assert (found.scans > 0) == name.startswith(RECURRENT)
    if found.is_negative:
        assert found.rewritten == 0


@pytest.mark.zoo
def test_recall(capsys):
    """Over what `test_sweep` ran: at least 99% of the sites in models that Dynamo takes whole are rewritten, or refused
    with a reason. Of a model that it breaks into pieces a backend may see no attention at all."""
    if not OUTCOMES:
        pytest.skip("no entry was swept")
    found = list(OUTCOMES.values())
    totals = Totals.of(one for one in found if TRUTH[one.name].whole)
    with capsys.disabled():
        Console(width=160).print("\n", table(found, ERRORS), f"all: {Totals.of(found)}", f"whole: {totals}", sep="\n")
    assert totals.known >= 0.99 * totals.eligible
    assert Totals.of(found).false_rewrites == 0
