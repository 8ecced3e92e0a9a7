"""Write a small LLaVA with a tokenizer into a folder, for vLLM with --load-format dummy.

usage: llava.py FOLDER_WITH_TOKENIZER_JSON OUT_DIR

Needs transformers, torch, torchvision and Pillow. An image has 64 tokens. The weights are random.
"""
import pathlib
import sys

import torch
from transformers import CLIPImageProcessor, CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor, PreTrainedTokenizerFast

src, out = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
torch.manual_seed(1)
tok = PreTrainedTokenizerFast(tokenizer_file=str(src / "tokenizer.json"), eos_token="<|im_end|>", pad_token="<|endoftext|>")
tok.add_special_tokens({"additional_special_tokens": ["<image>"]})
tok.chat_template = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
image = tok.convert_tokens_to_ids("<image>")
vocab = 4160
config = LlavaConfig(
    vision_config=CLIPVisionConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=2, image_size=112, patch_size=14, projection_dim=64),
    text_config=LlamaConfig(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=64, vocab_size=vocab, max_position_embeddings=8192),
    image_token_index=image, vision_feature_select_strategy="default", vision_feature_layer=-2)
LlavaForConditionalGeneration(config).save_pretrained(out)
LlavaProcessor(image_processor=CLIPImageProcessor(size={"shortest_edge": 112}, crop_size={"height": 112, "width": 112}), tokenizer=tok, patch_size=14, vision_feature_select_strategy="default", image_token="<image>", num_additional_image_tokens=1).save_pretrained(out)
print("image token", image)
