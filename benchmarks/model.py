#!/usr/bin/env python3
"""Writes the smallest model folder that Dynamo's frontend and mocker start with: a
tokenizer made from this repository's documents, and a configuration. Run by
routers.py install, in Dynamo's environment: model.py FOLDER."""
import json
import pathlib
import sys

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

folder = pathlib.Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
docs = [str(p) for p in sorted((pathlib.Path(__file__).resolve().parent.parent / "docs").rglob("*.md"))]
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
ends = ["<|im_start|>", "<|im_end|>"]
tokenizer.train(docs, trainers.BpeTrainer(vocab_size=8192, special_tokens=ends, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
tokenizer.save(str(folder / "tokenizer.json"))
template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
(folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": ends[1], "chat_template": template, "model_max_length": 131072}))
(folder / "config.json").write_text(json.dumps({
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": tokenizer.get_vocab_size(), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
    "num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 131072, "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "float16"}))
(folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
