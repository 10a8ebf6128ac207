"""Tiny models of words with a tokeniser of few words, in float64, for tests of text audits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from situs.audit.text.victim import Sentence, TextVictim, open_text_victim

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = [*SPECIAL, *(f"w{number}" for number in range(55))]
"""The vocabulary: w0 has the id 5, and so on."""

KINDS = {
    "bert": "BertForSequenceClassification",
    "masked": "BertForMaskedLM",
    "roberta": "RobertaForSequenceClassification",
    "roberta masked": "RobertaForMaskedLM",
    "distilbert": "DistilBertForSequenceClassification",
    "distilbert masked": "DistilBertForMaskedLM",
    "electra": "ElectraForSequenceClassification",
    "electra masked": "ElectraForMaskedLM",
    "albert": "AlbertForSequenceClassification",
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "gpt2 classes": "GPT2ForSequenceClassification",
    "llama classes": "LlamaForSequenceClassification",
    "qwen3 classes": "Qwen3ForSequenceClassification",
    "gpt_neox classes": "GPTNeoXForSequenceClassification",
}
"""Kind -> the class that its folder names."""

CAUSAL = tuple(kind for kind in KINDS if kind.startswith(("gpt2", "llama", "qwen3", "gpt_neox")))


def write_folder(folder: Path, kind: str, *, width: int = 48, seed: int = 0, **fields: Any) -> Path:
    """A folder of transformers with fresh weights, large enough that attention tells words apart."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if kind not in CAUSAL:
        ends = [("[CLS]", 2), ("[SEP]", 3)]
        forms = {"single": "[CLS] $A [SEP]", "pair": "[CLS] $A [SEP] $B:1 [SEP]:1"}
        words.post_processor = processors.TemplateProcessing(**forms, special_tokens=ends)
    names = {f"{name.strip('[]').lower()}_token": name for name in SPECIAL}
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **names).save_pretrained(folder)
    sizes: dict[str, Any] = {"hidden_size": width, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"max_position_embeddings": 16, "intermediate_size": 4 * width}
    if kind.startswith("gpt2"):
        sizes = {"n_embd": width, "n_layer": 2, "n_head": 4, "n_positions": 16}
    elif kind.startswith("distilbert"):
        sizes = {"dim": width, "n_layers": 2, "n_heads": 4, "hidden_dim": 4 * width, "max_position_embeddings": 16}
    elif kind.startswith("roberta"):
        sizes |= {"max_position_embeddings": 17, "pad_token_id": 0, "type_vocab_size": 1}  # a row of the padding's
    elif kind.startswith(("electra", "albert")):
        sizes |= {"embedding_size": width}
    elif kind.startswith("qwen3"):
        sizes |= {"head_dim": width // 4, "num_key_value_heads": 2}
    special = {"bos_token_id": None, "eos_token_id": None} if kind in CAUSAL else {}
    special |= {"pad_token_id": 0} if kind.endswith("classes") else {}
    made = getattr(transformers, KINDS[kind])
    torch.manual_seed(seed)
    sizes = {"vocab_size": len(WORDS), "initializer_range": 0.3, **sizes, **special, **fields}
    model = made(made.config_class(**sizes))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:  # fresh norms and biases are trivial, and hide mistakes
            parameter.data += 0.1 * torch.randn(parameter.shape)
        assert torch.isfinite(parameter).all(), name
    model.save_pretrained(folder)
    return folder


def victim(folder: Path, kind: str, **fields: Any) -> TextVictim:
    """The same, opened, in float64."""
    made = open_text_victim(write_folder(folder, kind, **fields))
    made.backbone.double()
    return made


def sentences(made: TextVictim, *texts: str) -> list[Sentence]:
    """ "3 7 1" stands for w3 w7 w1."""
    return made.coded([" ".join(f"w{word}" for word in text.split()) for text in texts])
