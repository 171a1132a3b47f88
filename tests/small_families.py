"""Small models with random weights of every model type that AutoModel knows, and inputs that they accept."""

import importlib.util
import inspect
import itertools
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModel, PreTrainedConfig, PreTrainedModel


HIDDEN, HEADS, INNER, WORDS, MEL = 64, 4, 48, 99, 16
# the names that configs have for the same few sizes
NAMES = {
    HIDDEN: "hidden_size d_model n_embd dim embed_dim encoder_embed_dim decoder_embed_dim embedding_size projection_dim "
    "encoder_hidden_dim decoder_hidden_dim d_embed hidden_dim_size vision_embed_dim encoder_hidden_size decoder_hidden_size "
    "text_hidden_size vision_hidden_size audio_hidden_size out_hidden_size mask_feature_size pooler_hidden_size "
    "position_embedding_hidden lm_hidden_size encoder_width cross_attention_hidden_size",
    HEADS: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads attention_heads "
    "decoder_num_attention_heads encoder_num_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts "
    "num_experts_per_layer decoder_num_key_value_heads encoder_num_key_value_heads linear_num_key_heads linear_num_value_heads "
    "num_codebooks patch_size",
    2: "num_key_value_heads num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers "
    "num_encoder_layers decoder_num_hidden_layers encoder_num_hidden_layers num_experts_per_tok moe_topk "
    "moe_k num_experts_per_token eos_token_id temporal_patch_size n_shared_experts depth top_k_experts num_frames "
    "attn_layer_period",
    INNER: "intermediate_size n_inner encoder_ffn_dim decoder_ffn_dim d_ff ffn_dim d_inner hidden_dim encoder_intermediate_size "
    "mlp_dim ffn_hidden_size dim_feedforward",
    16: "moe_intermediate_size shared_expert_intermediate_size head_dim d_kv q_lora_rank kv_lora_rank v_head_dim "
    "moe_shared_expert_intermediate_size qk_nope_head_dim attention_head_size linear_key_head_dim linear_value_head_dim "
    "global_head_dim swa_head_dim num_mel_bins n_mels input_feat_per_channel sliding_window codebook_dim "
    "index_head_dim expert_dim mamba_d_state",
    8: "qk_rope_head_dim rotary_dim",
    WORDS: "vocab_size decoder_vocab_size encoder_vocab_size vocab_size_per_layer_input text_vocab_size",
    128: "max_position_embeddings n_positions max_source_positions max_target_positions",
    1: "attn_layer_offset n_group topk_group first_k_dense_replace bos_token_id index_topk_freq",
    0: "pad_token_id num_nextn_predict_layers num_mtp_layers",
    3: "num_channels",
}
SIZES = {name: size for size, names in NAMES.items() for name in names.split()}
IMAGES = (32, 64, 224)
# what one model type needs besides these sizes, by dotted names of fields
FIELDS: dict[str, dict[str, Any]] = {}
INPUTS: dict[str, dict[str, Any]] = {}


def resnet() -> PreTrainedConfig:
    stages = [f"stage{number}" for number in (1, 2, 3, 4)]
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}
    return CONFIG_MAPPING["resnet"](**sizes, out_features=stages)


def values_of(config: PreTrainedConfig, image: int) -> dict[str, Any]:
    """The sizes that a config has fields for."""
    fields = config.__dict__
    staged = any(isinstance(fields.get(name), list | tuple) for name in ("depths", "num_heads", "hidden_sizes"))
    found = {}
    for name, size in {**SIZES, "image_size": image}.items():
        old = fields.get(name, inspect)
        if staged and name in ("embed_dim", "hidden_size", "hidden_dim", "patch_size", "num_heads", "embedding_size"):
            continue
        if isinstance(old, int) and not isinstance(old, bool) or name in ("n_inner", "head_dim") and old is None:
            found[name] = size
        if name in ("image_size", "patch_size") and isinstance(old, list | tuple):
            found[name] = [size] * len(old)
    if "qk_rope_head_dim" in found:  # the rotary width of latent attention is also called the width of its heads
        found.pop("head_dim", None)
    if isinstance(fields.get("depths"), list | tuple):
        found["depths"] = [min(2, depth) for depth in config.depths]
    if "use_timm_backbone" in fields or type(fields.get("backbone_config")).__name__ == "TimmBackboneConfig":
        found |= {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}
        found |= {"backbone_config": resnet()}
        found = {name: value for name, value in found.items() if name in fields}
    return found


def settle(config: PreTrainedConfig, default: PreTrainedConfig) -> None:
    """Fields that depend on others: kinds of layers, sections of rotary positions."""
    layers = getattr(config, "num_hidden_layers", 2)
    for name in ("layer_types", "mlp_layer_types", "layers_block_type"):
        kinds = default.__dict__.get(name)
        if isinstance(kinds, list) and kinds:
            kinds = list(dict.fromkeys(kinds))
            with suppress(Exception):
                setattr(config, name, [kinds[number % len(kinds)] for number in range(layers)])
    if "kv_lora_rank" in config.__dict__ and "num_key_value_heads" in config.__dict__:
        config.num_key_value_heads = config.num_attention_heads
    rope = config.__dict__.get("rope_parameters") or config.__dict__.get("rope_scaling")
    if isinstance(rope, dict) and (rope.get("mrope_section") or in_sections(config)):
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        half = int(width * rope.get("partial_rotary_factor", 1)) // 2
        third = half // 3
        sections = [third] * 3
        sections[0] += half - sum(sections)
        rope["mrope_section"] = sections


def in_sections(config: PreTrainedConfig) -> bool:
    """Whether the models of a config divide rotary positions into time, height and width."""
    spec = importlib.util.find_spec(type(config).__module__.replace("configuration_", "modeling_"))
    return spec is not None and "mrope_section" in Path(spec.origin).read_text()


def put(config: Any, path: str, value: Any) -> None:
    *outer, name = path.split(".")
    for step in outer:
        config = getattr(config, step)
    if isinstance(config, dict):
        config[name] = value
    else:
        setattr(config, name, value)


def constructed(kind: type[PreTrainedConfig], image: int, fields: dict[str, Any]) -> PreTrainedConfig:
    """A small config from its constructor, which derives fields from others."""
    try:
        default = kind()
    except Exception:
        default = None
    values = {name: value for name, value in fields.items() if "." not in name}
    if default is not None:
        values = values_of(default, image) | values
        for name, value in default.__dict__.items():
            if isinstance(value, PreTrainedConfig) and name not in values:
                inner = {path.split(".", 1)[1]: new for path, new in fields.items() if path.startswith(f"{name}.")}
                values[name] = constructed(type(value), image, inner)
    if default is not None and isinstance(layers := default.__dict__.get("layer_types"), list):
        kinds = list(dict.fromkeys(layers))
        values.setdefault("num_hidden_layers", 2)
        values["num_hidden_layers"] = max(values["num_hidden_layers"], len(kinds))
    try:
        config = kind(**values)
    except Exception:
        if default is not None and "layer_types" in default.__dict__:
            kinds = list(dict.fromkeys(default.layer_types))
            values["layer_types"] = [kinds[number % len(kinds)] for number in range(values["num_hidden_layers"])]
        config = kind(**values)
    if default is not None:
        settle(config, default)
    return config


def assigned(kind: type[PreTrainedConfig], image: int, fields: dict[str, Any]) -> PreTrainedConfig:
    """A default config whose fields are replaced after it was made."""

    def shrink(config: PreTrainedConfig) -> None:
        default = type(config)()
        for value in list(config.__dict__.values()):
            if isinstance(value, PreTrainedConfig):
                shrink(value)
        for name, value in values_of(config, image).items():
            with suppress(Exception):
                setattr(config, name, value)
        settle(config, default)

    config = kind()
    shrink(config)
    for path, value in fields.items():
        put(config, path, value)
    return config


class TooLarge(ValueError):
    """No small config was found."""


def models_of(model_type: str) -> Iterator[PreTrainedModel | Exception]:
    """Small models of one type, in the order in which they should be tried; an exception where one cannot be built."""
    kind, fields = CONFIG_MAPPING[model_type], FIELDS.get(model_type, {})
    for make, image in itertools.product((constructed, assigned), IMAGES):
        try:
            config = make(kind, image, fields)
            if make is constructed:
                for path, value in fields.items():
                    if "." in path:
                        put(config, path, value)
            config._attn_implementation = None
            with torch.device("meta"):
                size = sum(weight.numel() for weight in AutoModel.from_config(config).parameters())
            if size > 60_000_000:
                raise TooLarge(f"{size / 1e6:.0f} million weights")
            torch.manual_seed(0)
            yield livened(AutoModel.from_config(config, dtype=torch.float32).eval())
        except Exception as error:
            yield error


def livened(model: PreTrainedModel) -> PreTrainedModel:
    """Weights that start at zero or near it, such as layer scales, would hide parts of a model: they get random values."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.is_floating_point() and not name.endswith("bias") and float(weight.abs().max()) < 1e-2:
                weight.normal_(std=0.05)
    return model


def numbers(config: PreTrainedConfig, *names: str, default: int) -> int:
    """The first of these fields in a config or in one of its parts."""
    parts = [config, *(value for value in config.__dict__.values() if isinstance(value, PreTrainedConfig))]
    for name, part in itertools.product(names, parts):
        value = part.__dict__.get(name)
        if isinstance(value, list | tuple) and value:
            value = value[0]
        if isinstance(value, int) and value:
            return value
    return default


BINS = "num_mel_bins n_mels input_feat_per_channel feature_size input_dim feature_projection_input_dim".split()
EMBEDDED = "query_embeds inputs_embeds noise_embeds encoder_hidden_states visual_feats context_embeds".split()


def candidates(name: str, config: PreTrainedConfig) -> list[Any]:
    """Tensors that an input of this name can be."""
    words = numbers(config, "vocab_size", "decoder_vocab_size", "text_vocab_size", default=WORDS)
    hidden = numbers(config, "hidden_size", "d_model", "dim", "n_embd", "d_latents", "embed_dim", default=HIDDEN)
    ids = torch.randint(3, max(5, min(words, WORDS) - 8), (2, 12))
    channels = numbers(config, "num_channels", "in_channels", "in_chans", default=3)
    size = numbers(config, "image_size", default=64)
    patch, deep = numbers(config, "patch_size", default=4), numbers(config, "temporal_patch_size", default=1)
    mel = numbers(config, *BINS, default=MEL)
    frames = numbers(config, "num_frames", "frames_per_clip", default=2)
    if name in ("input_ids", "qformer_input_ids", "decoder_input_ids"):
        return [ids if name == "input_ids" else ids[:, :10]]
    if name in ("attention_mask", "input_features_mask", "qformer_attention_mask"):
        return [torch.ones(2, 12, dtype=torch.long)]
    if name in ("pixel_values", "prompt_pixel_values", "prompt_masks", "pixel_values_images"):
        shapes = [(2, channels, side, side) for side in dict.fromkeys((size, 64, 224))]
        shapes += [(2, frames, channels, size, size), (2, 2, channels, size, size), (16, channels * deep * patch**2)]
        return [torch.randn(shape) for shape in shapes]
    if name == "pixel_values_videos":
        return [torch.randn(2, frames, channels, size, size)]
    if name in ("grid_thw", "image_grid_thw"):
        return [torch.tensor([[1, 4, 4]])]
    if name == "hidden_states":
        return [torch.randn(shape) for shape in ((16, channels * deep * patch**2), (16, hidden), (2, 12, hidden))]
    if name == "input_values":
        frames = numbers(config, "max_length", default=64)
        return [torch.randn(shape) for shape in ((2, 3840), (2, 1, 3840), (2, frames, mel), (2, 64, mel))]
    if name == "input_features":
        positions = numbers(config, "max_source_positions", default=32)
        shapes = [(2, mel, 2 * positions), (2, 64, mel), (2, mel, 64), (2, 1, 64, mel), (2, 64, 2 * mel)]
        shapes += [(2, 64, 160), (2, 64, 128), (2, 64, 80), (2, 128, 64), (2, 80, 64)]
        return [torch.randn(shape) for shape in shapes]
    if name in ("past_values", "inputs", "past_time_features", "future_time_features"):
        length = numbers(config, "context_length", "max_position_embeddings", default=32)
        features = numbers(config, "num_input_channels", "num_time_features", default=1)
        return [torch.randn(2, length, features), torch.randn(2, length), torch.randn(2, 12, hidden)]
    if name == "bbox":
        return [torch.tensor([1, 2, 30, 40]).expand(2, 12, 4).contiguous(), torch.rand(2, 12, 4), torch.rand(2, 12, 8)]
    if name in EMBEDDED:
        return [torch.randn(2, 12, hidden)]
    return []


def batches_for(model: PreTrainedModel) -> Iterator[dict[str, Any]]:
    """Batches that the forward of a model may accept, the likely ones first."""
    torch.manual_seed(1)
    config, parameters = model.config, inspect.signature(model.forward).parameters
    given = INPUTS.get(config.model_type, {})
    stars = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    required = [name for name, entry in parameters.items() if entry.default is entry.empty and entry.kind not in stars]
    main = model.main_input_name
    wanted = dict.fromkeys([*([main] if main in parameters else []), *required])
    wanted |= dict.fromkeys(name for name in ("input_ids", "bbox") if name in parameters)
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in parameters:
        wanted["decoder_input_ids"] = None
    two = "input_ids" in wanted and "pixel_values" in parameters and "pixel_values" not in wanted
    sees = getattr(config, "vision_config", None) is not None
    placed = getattr(config, "image_token_id", None) or getattr(config, "image_token_index", None)
    sets = [list(wanted)]
    if two:
        sets.insert(0 if sees and not placed else 1, [*wanted, "pixel_values"])
    if "grid_thw" in parameters and "grid_thw" not in wanted:
        sets.insert(0, [*wanted, "grid_thw"])
    for names in sets:
        names = [name for name in names if name not in given]
        choices = [candidates(name, config) for name in names]
        for values in itertools.islice(itertools.product(*choices), 40):
            yield {**dict(zip(names, values, strict=True)), **given}


def runs(model: PreTrainedModel, batch: dict[str, Any]) -> str:
    """Why a batch does not run; empty if it does."""
    try:
        with torch.no_grad():
            model(**batch)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def small_and_running(model_type: str) -> tuple[PreTrainedModel | None, dict[str, Any] | None, str]:
    """A model and a batch that it runs on; the reason where there is none, with the model if one can be built."""
    built, reason = None, ""
    for model in models_of(model_type):
        if isinstance(model, Exception):
            reason = reason or f"{type(model).__name__}: {model}"
            continue
        if built is None:
            built, reason = model, ""
        for batch in batches_for(model):
            if not (failed := runs(model, batch)):
                return model, batch, ""
            reason = reason or failed
        reason = reason or f"no inputs are made for {', '.join(inspect.signature(model.forward).parameters)}"
    return built, None, " ".join(reason.split())
