"""The model of transformers that has the numbers of titan's own: random weights, of which none is like another."""

from torch import nn

from converters.families.registry import get_family


def model_of(family: str, args, *, attention: str = "eager", std: float = 0.1) -> nn.Module:
    """Its router decides with a wide margin; norms, biases and sinks show if they are left out.

    `attention`: also `sdpa`. `std`: of matrices; at transformers' 0.02 even a wrong permutation hardly moves a logit.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**get_family(family).hf_config(args))
    config._attn_implementation, config._experts_implementation = attention, "eager"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).float().eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.uniform_(0.5, 1.5)
                else:
                    decides = name.endswith("mlp.gate.weight") or ".router." in name or "sinks" in name
                    parameter.normal_(0, 1.0 if decides else std)
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.uniform_(-0.3, 0.3)
    return model
