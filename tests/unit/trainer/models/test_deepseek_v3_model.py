"""Our DeepSeek V3 and V2 against transformers', and routing and attention against the published formulas."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from converters.families.deepseek_v3 import FLAVORS, DeepSeekArgs, block, parameters, softmax_scale
from converters.families.rope import YarnRope
from converters.source.weights import open_native
from tests.models.deepseek import NUMBERS, native_logits
from tests.models.deepseek import write as write_deepseek
from tests.models.names import native_tensors
from tests.models.of_args import model_of
from trainer.models.initialization import Constant, Normal, initial_distribution
from trainer.models.moe import Router
from trainer.models.registry import get_trainer_family
from trainer.models.tensor_plan import TensorStyle

# The config's eps is not that of the latents' norms
EPS = {"norm_eps": 1e-3}
ARGS = {name: replace(FLAVORS[name], vocab_size=256, **EPS) for name in ("debug_v3", "debug_v2", "debug_v2_lite")}
ORIGINAL = 64  # YaRN's, of these flavors
KIMI_YARN = YarnRope(32.0, ORIGINAL, beta_fast=1.0, mscale=1.0, mscale_all_dim=1.0)
_WITHOUT_GROUPS = replace(ARGS["debug_v3"], num_groups=1, top_groups=1, rope_theta=5e4)
ARGS |= {
    "moonlight": replace(_WITHOUT_GROUPS, q_rank=0, num_shared_experts=2, route_scale=2.446, rope_scaling=None),
    "kimi": replace(_WITHOUT_GROUPS, route_scale=2.827, rope_scaling=KIMI_YARN),
}


def our_model(theirs: nn.Module, args: DeepSeekArgs) -> nn.Module:
    model = get_trainer_family("deepseek_v3").build_model(args)
    missing = model.load_state_dict(native_tensors(theirs.state_dict()), strict=False)
    assert not missing.unexpected_keys and all(key.endswith("expert_bias") for key in missing.missing_keys)
    return model


def tokens_of(args: DeepSeekArgs, length: int) -> Tensor:
    return torch.randint(args.vocab_size, (2, length), generator=torch.Generator().manual_seed(1))


def published_routes(logits_TE: Tensor, bias_E: Tensor, args: DeepSeekArgs) -> tuple[Tensor, Tensor, Tensor]:
    """Ids in ascending order, their weights, and by how much groups and experts were chosen, token by token.

    DeepSeek-V3, arXiv 2412.19437, equations 12 to 16 and section 2.1.2; DeepSeek-V2, arXiv 2405.04434, 2.1.2.
    """
    is_v3, size = args.score == "sigmoid", args.num_experts // args.num_groups
    ids, weights, margins = [], [], []
    for logits_E in logits_TE:
        scores = logits_E.sigmoid() if is_v3 else logits_E.softmax(0)
        choice = (scores + bias_E).tolist()
        groups = [sorted(range(start, start + size), key=lambda e: -choice[e]) for start in range(0, len(choice), size)]
        groups.sort(key=lambda group: -sum(choice[e] for e in group[: 2 if is_v3 else 1]))
        rated = [sum(choice[e] for e in group[: 2 if is_v3 else 1]) for group in groups]
        allowed = sorted((e for group in groups[: args.top_groups] for e in group), key=lambda e: -choice[e])
        chosen = sorted(allowed[: args.experts_per_token])
        last = choice[allowed[args.experts_per_token - 1]]
        margin = last - choice[allowed[args.experts_per_token]]
        if args.top_groups < args.num_groups:
            margin = min(margin, rated[args.top_groups - 1] - rated[args.top_groups])
        margin /= 1 if is_v3 else abs(last)  # softmax's scores are tiny: their logarithms differ by as much
        weight = scores[chosen]
        if args.normalize_weights:
            weight = weight / (weight.sum() + 1e-20)
        ids.append(torch.tensor(chosen))
        weights.append(weight * args.route_scale)
        margins.append(margin)
    return torch.stack(ids), torch.stack(weights), torch.tensor(margins)


@pytest.fixture(params=ARGS)
def args(request) -> DeepSeekArgs:
    return ARGS[request.param]


@pytest.mark.parametrize("length", [1, ORIGINAL // 2, 3 * ORIGINAL])
def test_logits_of_deepseek_are_those_of_transformers(args, length):
    """YaRN is always on: also where the model is made for no more tokens than the original length."""
    args = replace(args, max_seq_len=max(length, ORIGINAL))
    theirs, tokens = model_of("deepseek_v3", args), tokens_of(args, length)
    ours, routed, logits = our_model(theirs, args), [], []
    for layer in ours.layers.values():
        if hasattr(layer, "moe"):
            layer.moe.router.register_forward_hook(lambda _, inputs, routes: routed.append((routes.ids_TK, inputs[1])))
    for layer in theirs.model.layers:
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(lambda gate, inputs, output: logits.append(output[0]))
    with torch.no_grad():
        found, wanted = ours(tokens), theirs(tokens).logits
        their_logits = list(logits)
        exact = theirs.double()(tokens).logits
    own_error = (wanted.double() - exact).abs().max().item()
    assert (found - wanted).abs().max().item() <= max(1e-5 * wanted.abs().max().item(), 4 * own_error)

    assert len(routed) == len(their_logits) == args.num_layers - args.num_dense_layers
    num_clear = num_tokens = 0
    for (ids_TK, bias_E), logits_TE in zip(routed, their_logits, strict=True):
        assert bias_E.any() == (args.score == "sigmoid")
        ids, _, margins = published_routes(logits_TE, bias_E, args)
        is_clear = margins > 1e-6
        assert ids_TK.sort(dim=-1).values[is_clear].equal(ids[is_clear])
        num_clear, num_tokens = num_clear + int(is_clear.sum()), num_tokens + len(is_clear)
    assert num_clear >= 0.999 * num_tokens > 0


@pytest.mark.parametrize("name", NUMBERS)
def test_a_folder_of_transformers_is_computed_as_the_papers_say(name, tmp_path):
    """With the numbers and names that titan reads from it: also without YaRN, groups, or a query's latent."""
    theirs, tokens = write_deepseek(tmp_path, name), torch.arange(48) * 7 % 97
    with open_native(tmp_path) as weights:
        args, arrays = weights.info.args, {fqn: torch.from_numpy(weights.read(fqn)) for fqn in weights.tensors}
    model = get_trainer_family("deepseek_v3").build_model(args)
    model.load_state_dict(arrays)
    with torch.no_grad():
        found, output = model(tokens[None])[0], theirs(tokens[None]).logits[0]
    for wanted in (native_logits(arrays, tokens, args), output):
        assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_gradients_are_those_of_transformers(args):
    theirs, tokens = model_of("deepseek_v3", args), tokens_of(args, 16)
    ours = our_model(theirs, args)
    for model in (ours, theirs):
        output = model(tokens)
        (output if isinstance(output, Tensor) else output.logits).logsumexp(-1).square().mean().backward()
    wanted = native_tensors({name: p.grad for name, p in theirs.named_parameters()})
    found = {name: p.grad for name, p in ours.named_parameters()}
    assert found.keys() == wanted.keys()
    far = {n: ((found[n] - wanted[n]).norm() / wanted[n].norm()).item() for n in wanted}
    assert {name: error for name, error in far.items() if not error <= 1e-4} == {}


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({}, "debug_v3"),
        ({}, "debug_v2"),  # transformers' has no bias: here it has one
        ({}, "debug_v2_lite"),
        ({"normalize_weights": True, "route_scale": 1.0}, "debug_v2"),
        ({"normalize_weights": False, "top_groups": 4}, "debug_v3"),
    ],
)
def test_routes_are_the_published_ones(changed, name):
    args = replace(ARGS[name], **changed)
    torch.manual_seed(0)
    router = Router(args.dim, block(args, 2).feed_forward)
    nn.init.normal_(router.gate.weight, std=0.3)
    x_TD, bias_E = torch.randn(300, args.dim), torch.empty(args.num_experts).uniform_(-0.3, 0.3)
    found, weights_TK = router(x_TD, bias_E)
    ids, weights, margins = published_routes(router.gate(x_TD), bias_E, args)
    assert (margins > 1e-6).all()
    order = found.argsort(dim=-1)
    assert found.gather(1, order).equal(ids)
    assert weights_TK.gather(1, order).allclose(weights, rtol=1e-6)


def test_a_group_may_win_by_its_sum_or_by_its_best():
    """Two groups of two: the one has the best expert, the other the larger sum."""
    args = replace(ARGS["debug_v3"], dim=4, num_experts=4, num_groups=2, top_groups=1, experts_per_token=2)
    scores = torch.tensor([[0.8, 0.1, 0.6, 0.5]])
    for changed, wanted in (({}, [2, 3]), ({"score": "softmax"}, [0, 1])):
        router = Router(4, block(replace(args, **changed), 2).feed_forward)
        router.gate.weight.data.copy_(torch.eye(4))
        logits = scores.logit() if not changed else scores.log()
        assert router(logits, torch.zeros(4)).ids_TK.sort(dim=-1).values.tolist() == [wanted]


def test_the_plan_gathers_latents_and_not_hidden_states():
    """A query without a latent gathers its input itself."""
    family = get_trainer_family("deepseek_v3")
    for name in ("debug_v3", "debug_v2_lite"):
        plan = family.tensor_plan(parameters(FLAVORS[name]))
        of_attention = {n.removeprefix("layers.1."): s for n, s in plan.items() if n.startswith("layers.1.attention")}
        queries = (
            {
                "attention.wq_a": TensorStyle.TOKENS,
                "attention.q_norm": TensorStyle.TOKENS,
                "attention.wq_b": TensorStyle.COLUMNS_OF_GATHERED,
            }
            if FLAVORS[name].q_rank
            else {"attention.wq": TensorStyle.GATHERED_COLUMNS}
        )
        assert of_attention == queries | {
            "attention.wkv_a": TensorStyle.TOKENS,
            "attention.kv_norm": TensorStyle.TOKENS,
            "attention.latents": TensorStyle.GATHER_LATENTS,
            "attention.wkv_b": TensorStyle.COLUMNS_OF_GATHERED,
            "attention.wo": TensorStyle.ROWS,
            "attention_norm": TensorStyle.SEQUENCE_SHARDS,
        }
        assert plan["layers.1.moe.shared_experts"] is TensorStyle.GATHER_SEQUENCE
        assert plan["layers.1.moe.shared_experts.w2"] is TensorStyle.ROWS


def test_initial_weights_are_drawn_as_by_torchtitan():
    """Of v0.2.2's init_weights: std 0.02, of what is added to the residual stream and of `w3` less in deeper layers."""
    drawn = {p.fqn: initial_distribution(p, FLAVORS["debug_v3"]) for p in parameters(FLAVORS["debug_v3"])}
    layer, deeper = "layers.2.", Normal(0.02 / 6**0.5)
    latents = ("wq_a", "wq_b", "wkv_a", "wkv_b")
    assert all(drawn[f"{layer}attention.{name}.weight"] == Normal(0.02) for name in latents)
    assert all(drawn[f"{layer}attention.{name}.weight"] == Constant(1.0) for name in ("q_norm", "kv_norm"))
    assert drawn[f"{layer}attention.wo.weight"] == drawn[f"{layer}moe.router.gate.weight"] == deeper
    assert drawn[f"{layer}moe.shared_experts.w1.weight"] == drawn[f"{layer}moe.experts.w1"] == Normal(0.02)
    assert all(drawn[f"{layer}moe.shared_experts.{w}.weight"] == drawn[f"{layer}moe.experts.{w}"] for w in ("w2", "w3"))
    assert drawn[f"{layer}moe.experts.w3"] == deeper and drawn[f"{layer}moe.expert_bias"] == Constant(0.0)


@pytest.mark.parametrize(
    ("flavor", "factor"), [("671B", 1.8739), ("236B", 1.8739), ("16B", 1.5896), ("debugmodel", 1.5896)]
)
def test_scores_are_scaled_at_every_length(flavor, factor):
    """The published factors of 192^-½: (0.1 · mscale · ln 40 + 1)²."""
    assert softmax_scale(FLAVORS[flavor]) * 192**0.5 == pytest.approx(factor, abs=5e-5)
    assert softmax_scale(replace(FLAVORS[flavor], rope_scaling=None)) == 192**-0.5
