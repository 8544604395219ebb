"""Tokenizer classes of transformers: the one that reads a folder, and what they make of a vocabulary.

A generic class takes tokenizer.json as it is. The others take vocabulary, merges and post-processor of it, and split
and normalize text by code of their own: these are the ones of language models, as of transformers 5.23.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from converters.common.errors import UnsupportedError
from converters.common.names import TOKENIZER_CONFIG

GENERIC = "PreTrainedTokenizerFast"
_SPACE = "\u2581"
_END = "<|endoftext|>"
_QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN3_5_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
Merges = Sequence[tuple[str, str]]
Settings = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TokenizerClass:
    """A class that builds its tokenizer from vocabulary and merges. `defaults`: of its settings."""

    build: Callable[[dict[str, int], Merges, Settings], Tokenizer]
    defaults: Settings = field(default_factory=dict)
    from_sentencepiece: bool = False  # it does not look for vocab.json and merges.txt
    extra: tuple[str, ...] = ()  # special tokens of the class
    adds_named: bool = False  # named tokens become added tokens even if the vocabulary has them
    resets_post_processor: bool = False


def _llama(vocab: dict[str, int], merges: Merges, settings: Settings) -> Tokenizer:
    prefix = settings.get("add_prefix_space") is not False
    scheme = "never" if not prefix else "always" if settings.get("legacy") else "first"
    tokenizer = Tokenizer(BPE(vocab, list(merges), fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme=scheme, split=False)
    tokenizer.decoder = _byte_fallback(strip=prefix)
    return tokenizer


def _code_llama(vocab: dict[str, int], merges: Merges, settings: Settings) -> Tokenizer:
    scheme = "never" if settings.get("add_prefix_space") is False else "first"
    unk = str(settings["unk_token"])
    tokenizer = Tokenizer(BPE(vocab, list(merges), fuse_unk=True, byte_fallback=True, unk_token=unk))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme=scheme, split=False)
    tokenizer.decoder = _byte_fallback(strip=True)
    return tokenizer


def _gemma(vocab: dict[str, int], merges: Merges, settings: Settings) -> Tokenizer:
    unk = str(settings["unk_token"])
    tokenizer = Tokenizer(BPE(vocab, list(merges), fuse_unk=True, byte_fallback=True, unk_token=unk))
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = _byte_fallback(strip=False)
    return tokenizer


def _byte_fallback(*, strip: bool) -> decoders.Decoder:
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", left=1)] if strip else steps)


def _byte_level(
    split: str = "", *, nfc: bool = False, digits: bool = False, post_processes: bool = False
) -> Callable[[dict[str, int], Merges, Settings], Tokenizer]:
    """GPT-2's kind: bytes as letters, split by `split` or as GPT-2 does."""

    def build(vocab: dict[str, int], merges: Merges, settings: Settings) -> Tokenizer:
        tokenizer = Tokenizer(BPE(vocab, list(merges), continuing_subword_prefix="", end_of_word_suffix=""))
        prefix = bool(settings.get("add_prefix_space"))
        level = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=not split)
        before: list[pre_tokenizers.PreTokenizer] = []
        if split:
            before.append(pre_tokenizers.Split(Regex(split), behavior="isolated"))
        if digits:
            before.append(pre_tokenizers.Digits(individual_digits=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*before, level]) if before else level
        if nfc:
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.decoder = decoders.ByteLevel()
        if post_processes:
            tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
        return tokenizer

    return build


_ANGLES = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
_GPT2 = {"unk_token": _END, "bos_token": _END, "eos_token": _END, "pad_token": None}
_QWEN = {"unk_token": _END, "eos_token": _END, "pad_token": _END}
_INFILLING = {
    "prefix_token": "▁<PRE>",
    "middle_token": "▁<MID>",
    "suffix_token": "▁<SUF>",
    "eot_token": "▁<EOT>",
    "fill_token": "<FILL_ME>",
}
CLASSES: dict[str, TokenizerClass] = {
    "LlamaTokenizer": TokenizerClass(_llama, _ANGLES, from_sentencepiece=True),
    "CodeLlamaTokenizer": TokenizerClass(
        _code_llama,
        _ANGLES | {"add_bos_token": True} | _INFILLING,
        from_sentencepiece=True,
        extra=tuple(_INFILLING.values()),
    ),
    "GemmaTokenizer": TokenizerClass(
        _gemma,
        {
            "unk_token": "<unk>",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "mask_token": "<mask>",
        },
        from_sentencepiece=True,
    ),
    "Qwen2Tokenizer": TokenizerClass(_byte_level(_QWEN_SPLIT, nfc=True), _QWEN, adds_named=True),
    "Qwen3_5Tokenizer": TokenizerClass(_byte_level(_QWEN3_5_SPLIT, nfc=True), _QWEN, from_sentencepiece=True),
    "GPT2Tokenizer": TokenizerClass(_byte_level(), _GPT2),
    "CodeGenTokenizer": TokenizerClass(_byte_level(post_processes=True), _GPT2),
    "GPTNeoXTokenizer": TokenizerClass(
        _byte_level(nfc=True), _GPT2 | {"pad_token": "<|padding|>"}, resets_post_processor=True
    ),
    "CohereTokenizer": TokenizerClass(
        _byte_level(nfc=True, digits=True),
        {
            "unk_token": "<UNK>",
            "bos_token": "<BOS_TOKEN>",
            "eos_token": "<|END_OF_TURN_TOKEN|>",
            "pad_token": "<PAD>",
            "cls_token": "<CLS>",
            "sep_token": "<SEP>",
            "mask_token": "<MASK_TOKEN>",
        },
        adds_named=True,
    ),
}
# Classes of encoders, speech and translation models, whose code is not repeated here
_OTHERS = """
    AlbertTokenizer BartTokenizer BarthezTokenizer BartphoTokenizer BertGenerationTokenizer BertJapaneseTokenizer
    BertTokenizer BertweetTokenizer BigBirdTokenizer BioGptTokenizer BlenderbotSmallTokenizer BlenderbotTokenizer
    ByT5Tokenizer CLIPTokenizer CTRLTokenizer CamembertTokenizer CanineTokenizer ClvpTokenizer ConvBertTokenizer
    CpmAntTokenizer CpmTokenizer DPRContextEncoderTokenizer DPRQuestionEncoderTokenizer DPRReaderTokenizer
    DebertaTokenizer DebertaV2Tokenizer DiaTokenizer DistilBertTokenizer ElectraTokenizer EsmTokenizer EsmcTokenizer
    FNetTokenizer FSMTTokenizer FastSpeech2ConformerTokenizer FlaubertTokenizer FunnelTokenizer GPTNeoXJapaneseTokenizer
    GPTSw3Tokenizer HerbertTokenizer LEDTokenizer LasrTokenizer LayoutLMTokenizer LayoutLMv2Tokenizer
    LayoutLMv3Tokenizer LayoutXLMTokenizer LongformerTokenizer LukeTokenizer LxmertTokenizer M2M100Tokenizer
    MBart50Tokenizer MBartTokenizer MLukeTokenizer MPNetTokenizer MarianTokenizer MarkupLMTokenizer MgpstrTokenizer
    MobileBertTokenizer MvpTokenizer MyT5Tokenizer NllbTokenizer NougatTokenizer OpenAIGPTTokenizer PLBartTokenizer
    ParakeetTokenizer PegasusTokenizer PerceiverTokenizer PhobertTokenizer Pop2PianoTokenizer ProphetNetTokenizer
    RagTokenizer ReformerTokenizer RemBertTokenizer RoCBertTokenizer RoFormerTokenizer RobertaTokenizer
    SeamlessM4TTokenizer SentencePieceBackend Siglip2Tokenizer SiglipTokenizer Speech2TextTokenizer SpeechT5Tokenizer
    SplinterTokenizer SqueezeBertTokenizer T5Tokenizer TapasTokenizer Tipsv2Tokenizer UdopTokenizer VideoPrismTokenizer
    VitsTokenizer Wav2Vec2CTCTokenizer Wav2Vec2PhonemeCTCTokenizer WhisperTokenizer XGLMTokenizer XLMRobertaTokenizer
    XLMTokenizer XLNetTokenizer"""
OTHERS = frozenset(_OTHERS.split())
# The class of a model type, which reads if tokenizer_config.json names none
_OF_TYPES = {
    GENERIC: """EvollaModel arctic aria beam bigbird_pegasus camembertv2-base canary chatlm cohere_asr ernie4_5
        ernie4_5_moe flex_olmo fuyu glm glm4 glm4_moe glm4_moe_lite glm4v glm4v_moe glm_image glmasr got_ocr2
        gpt_bigcode gradium_phonon_tts granite granitemoe granitemoehybrid granitemoeshared h2ovl_chat hyperclovax
        hyperclovax_vlm internlm2 internlm3 iquestcoder jamba kimi_k25 kimi_linear kosmos-2 llava llava_next
        mimo_v2_flash minicpm3 minicpm_ocr minicpmv minicpmv4_6 minicpmv4_7 minimax_m2 ministral ministral3 mistral
        mistral3 mistral_large4 mixtral modernbert modernbert-decoder molmo molmo2 nemo_speechlm nemotron nvfp4
        nystromformer olmo2 olmo3 olmo_hybrid opencua openvla paddleocr_vl pegasus_x persimmon phi3 phi3_v phimoe
        pix2struct pixtral pocket_tts smolvlm stablelm step3_vl umt5 vipllava voxtral voxtral_realtime
        xlm-roberta-xl""",
    "GemmaTokenizer": """diffusion_gemma gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text recurrent_gemma
        shieldgemma2 t5gemma zaya""",
    "Qwen2Tokenizer": """audioflamingo3 colqwen2 cosmos3_omni dots3_note fun_asr_nano hunyuan_vl internvl lighton_ocr
        moss_transcribe_diarize ovis2 qianfan_ocr qwen2 qwen2_5_omni qwen2_5_vl qwen2_audio qwen2_moe qwen2_vl qwen3
        qwen3_asr qwen3_moe qwen3_next qwen3_omni_moe qwen3_vl qwen3_vl_moe vibevoice""",
    "Qwen3_5Tokenizer": "qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen4_exp",
    "GPT2Tokenizer": """blip-2 codegen dbrx emu3 gpt2 gpt_neo gptj hyperclovax_vision_v2 instructblip
        instructblipvideo jais2 opt phi starcoder2""",
    "GPTNeoXTokenizer": "falcon_mamba gpt_neox mamba mamba2 mpt olmo olmoe rwkv xlstm",
    "CohereTokenizer": "aya_vision cohere cohere2",
    "LlamaTokenizer": "idefics idefics2",
    "CodeLlamaTokenizer": "code_llama",
}
_TYPES_OF_OTHERS = """
    aimv2 albert align bark bart barthez bartpho bert bert-generation bert-japanese bertweet big_bird biogpt
    blenderbot blenderbot-small blip bridgetower bros byt5 camembert canine chinese_clip clap clip clipseg clvp
    convbert cpm cpmant ctrl data2vec-audio data2vec-text deberta deberta-v2 dia distilbert dpr electra ernie
    esm esmc esmfold2 fastspeech2_conformer flaubert flava florence2 fnet fsmt funnel git gpt-sw3
    gpt_neox_japanese granite_speech5_ctc grounding-dino groupvit gte herbert hubert ibert jina_embeddings_v3
    lasr_ctc lasr_encoder layoutlm layoutlmv2 layoutlmv3 layoutxlm led lilt longformer luke lxmert m2m_100
    marian markuplm mbart mbart50 mega megatron-bert metaclip_2 mgp-str mluke mm-grounding-dino mobilebert mpnet
    mra mt5 musicgen musicgen_melody mvp myt5 nemotron3_5_asr nemotron_asr_streaming nezha nllb nllb-moe
    nomic_bert nougat omdet-turbo oneformer openai-gpt owlv2 owlvit parakeet_ctc parakeet_rnnt parakeet_tdt
    pegasus perceiver phobert plbart pp_formulanet prophetnet qdqbert rag realm reformer rembert retribert
    roberta roberta-prelayernorm roc_bert roformer sam3 sam3_video seamless_m4t seamless_m4t_v2 siglip siglip2
    speech_to_text speecht5 splinter squeezebert switch_transformers t5 tapas tipsv2 trocr tvp udop unispeech
    unispeech-sat videoprism vilt visual_bert vits wav2vec2 wav2vec2-bert wav2vec2-conformer wav2vec2_phoneme
    whisper xclip xglm xlm xlm-roberta xlnet xmod yoso"""
OF_TYPE = dict.fromkeys(_TYPES_OF_OTHERS.split(), "BertTokenizer") | {  # which of the others does not matter
    type: name for name, types in _OF_TYPES.items() for type in types.split()
}
# Model types of which repositories name a wrong class: that of the type reads
_WRONGLY_NAMED = """arctic camembertv2-base chatlm cohere_asr ernie4_5 ernie4_5_moe fuyu h2ovl_chat hyperclovax
    hyperclovax_vision_v2 hyperclovax_vlm internlm2 internlm3 iquestcoder jamba llava llava_next minicpm3 minicpmv
    minimax_m2 modernbert modernbert-decoder molmo molmo2 nemotron nvfp4 opencua openvla paddleocr_vl phi3 phi3_v
    phimoe qwen2 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen4_exp siglip2 smolvlm step3_vl vipllava"""
WRONGLY_NAMED = frozenset(_WRONGLY_NAMED.split())


def class_name(settings: Settings, config: Settings, *, is_byte_level: Callable[[], bool]) -> str:
    """The class that transformers' AutoTokenizer takes: GENERIC, or a name of CLASSES.

    `settings` are tokenizer_config.json, `config` config.json. Raises UnsupportedError for a class of OTHERS, and if
    only code of the folder could read the tokenizer.
    """
    model_type, of_file = str(config.get("model_type")), settings.get("tokenizer_class")
    named = (of_file or config.get("tokenizer_class") or "").removesuffix("Fast")
    of_type = OF_TYPE.get(model_type)
    is_wrong = bool({model_type, config.get("model_name")} & WRONGLY_NAMED)
    mapped = settings.get("auto_map")
    if (mapped if isinstance(mapped, list) else (mapped or {}).get("AutoTokenizer")) is not None:
        if of_type is None and _known(named) is None:
            raise UnsupportedError(
                f"{TOKENIZER_CONFIG} names a tokenizer of the folder's own code (auto_map)",
                hint="titan runs no code of a model; a folder whose tokenizer.json has a class of transformers is read",
            )
    elif named == "LlamaTokenizer" and not is_wrong and is_byte_level():
        return GENERIC
    elif named and of_type and of_type != named:
        named = of_type if is_wrong or of_type == GENERIC else named
    name = _known(named) if named else of_type
    if name in OTHERS:
        which = f"the class {named}" if named else f"the class of {model_type} models"
        raise UnsupportedError(
            f"{which} of transformers, which reads this tokenizer, is not supported",
            hint=f"`tokenizer_class: {GENERIC}` in {TOKENIZER_CONFIG} takes tokenizer.json as it is",
        )
    return name or GENERIC


def _known(name: str) -> str | None:
    """A class of transformers by its name without Fast; None for one that it does not have."""
    generic = ("PreTrainedTokenizer", "TokenizersBackend", "BloomTokenizer", "PythonBackend")
    return GENERIC if name in generic else name if name in CLASSES or name in OTHERS else None
