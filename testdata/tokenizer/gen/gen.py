#!/usr/bin/env python3
"""Write the synthetic tokenizers and reference vectors of testdata/tokenizer.

usage: gen.py OUT_DIR          (needs: pip install tokenizers==0.23.3)
       gen.py --vectors TOKENIZER_JSON OUT_JSONL [COUNT]
       gen.py --bench TOKENIZER_JSON TEXT_FILE

The first form trains one small byte-level BPE per family on made-up text,
with the exact pre-tokenizer, normalizer and post-processor that the real
files of that family have, and writes the ids that the Hugging Face package
computes for texts.json, and the texts that it decodes ids to. Everything is seeded.

The second form writes vectors for any real file: one JSON object a line with
"text", "ids" (add_special_tokens=False) and "special" (True). Point
DYNCTL_TOKENIZER and DYNCTL_TOKENIZER_VECTORS at the two and run
`go test ./internal/router/tokenize/bpe -run External`.

The third form prints the package's cold single-thread speed over a file.
"""

import json
import os
import pathlib
import random
import sys
import time

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CL100K = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?%s+|\p{N}%s| ?[^\s%s\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
LLAMA3 = CL100K % (r"\p{L}", "{1,3}", r"\p{L}")
QWEN2 = CL100K % (r"\p{L}", "", r"\p{L}")
QWEN35 = CL100K % (r"[\p{L}\p{M}]", "", r"\p{L}\p{M}")
O200K = "|".join([
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+",
])
DEEPSEEK = [
    r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
]


def split(*patterns):
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(p), "isolated") for p in patterns]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def plain(content, **kw):
    return AddedToken(content, normalized=kw.pop("normalized", False), special=kw.pop("special", True), **kw)


CHAT = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
FAMILIES = {
    "gpt2": dict(pre=lambda: pre_tokenizers.ByteLevel(add_prefix_space=False), added=[plain("<|endoftext|>")]),
    "llama3": dict(pre=lambda: split(LLAMA3), bos="<|begin_of_text|>", ignore_merges=True, string_merges=True, added=[
        plain(t) for t in ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]]),
    "qwen2": dict(pre=lambda: split(QWEN2), norm=normalizers.NFC(), added=[plain(t) for t in CHAT] + [
        plain(t, special=False) for t in ["<think>", "</think>", "<tool_call>", "</tool_call>"]]),
    "qwen35": dict(pre=lambda: split(QWEN35), norm=normalizers.NFC(), added=[plain(t) for t in CHAT]),
    "o200k": dict(pre=lambda: split(O200K), added=[plain(t) for t in ["<|start|>", "<|end|>", "<|message|>"]]),
    "deepseek3": dict(pre=lambda: split(*DEEPSEEK), norm=normalizers.Sequence([]), added=[
        plain("<｜begin▁of▁sentence｜>"), plain("<｜end▁of▁sentence｜>"),
        plain("<｜User｜>", normalized=True, special=False), plain("<｜Assistant｜>", normalized=True, special=False)]),
    # Every flag of an added token, over NFKC.
    "flags": dict(pre=lambda: split(QWEN2), norm=normalizers.NFKC(), bos="<s>", eos="</s>", added=[
        plain("<s>"), plain("</s>"), plain("<|left|>", lstrip=True), plain("<|right|>", rstrip=True),
        plain("<|both|>", lstrip=True, rstrip=True), plain("word", single_word=True, special=False),
        plain("ﬁne", normalized=True, special=False), plain("[[", normalized=True, special=False),
        plain("[[[x", special=False), plain(" lead", special=False)]),
}

PROSE = {
    "en": "the router sends every request where its prefix is already cached so that nothing is computed twice and "
          "nobody waits for it isn't it we've they'll you're he'd I'm she's cat's streaming tokens arrive one by one",
    "de": "Größere Blöcke müssen schließlich früher überprüft werden außerdem hört das Gerät natürlich zu",
    "fr": "l'été dernier où étaient passés les élèves déjà prêts à répondre très vite ça va s'améliorer",
    "ru": "маршрутизатор отправляет каждый запрос туда где его начало уже посчитано и хранится",
    "el": "ο δρομολογητής στέλνει κάθε αίτημα εκεί όπου υπάρχει ήδη η αρχή του",
    "ar": "يرسل الموجه كل طلب إلى حيث توجد بدايته بالفعل في الذاكرة",
    "he": "הנתב שולח כל בקשה למקום שבו ההתחלה שלה כבר שמורה",
    "hi": "राउटर हर अनुरोध को वहाँ भेजता है जहाँ उसकी शुरुआत पहले से मौजूद है",
    "th": "เราเตอร์ส่งทุกคำขอไปยังที่ที่มีส่วนต้นอยู่แล้ว",
    "ko": "라우터는 모든 요청을 이미 앞부분이 저장된 곳으로 보낸다",
    "ja": "ルーターは、すべてのリクエストを、先頭部分がすでに保存されている場所へ送ります。カタカナ・ひらがなと漢字ー々",
    "zh": "路由器把每个请求发送到已经缓存了前缀的地方，这样就不会重复计算。你好，世界！真的吗？",
    "vi": "bộ định tuyến gửi mỗi yêu cầu đến nơi phần đầu của nó đã được lưu",
}
CODE = """func (t *Tree) Overlap(h []uint64) (n int) {\n\tfor i, x := range h {\n\t\tif !t.has(x) {\n\t\t\treturn i\n\t\t}\n\t}\n\treturn len(h)\n}
def __init__(self, *, max_tokens=4096):\n    self.cache = {}\n    assert max_tokens > 0, f"bad {max_tokens!r}"\n    return None
const x = arr.map((v) => v?.id ?? 0).filter(Boolean); // TODO_HERE => done\n/* a */ if (a&&b||c) { x += 1e-9; }\n
SELECT id, COUNT(*) FROM t WHERE name LIKE '%a_b%' GROUP BY 1;\n#include <stdio.h>\r\nint main(void) { return 0x7fff; }\r\n
{"name": "get_weather", "arguments": {"city": "Zürich", "days": [1, 2, 3]}}\nHTTPServer getURLForID XMLHttpRequest iOSApp camelCaseWords SCREAMING_SNAKE dzDžDZ
"""
EMOJI = "😀😂🥹👍🏽👩‍👩‍👧‍👦🏳️‍🌈🇩🇪🇯🇵1️⃣❤️‍🔥✈️☕️🫠🪿🫨♟️"
SPACES = [" ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "\t\t", " \n", "\n ", "\r", "\u00a0", "\u3000", "\u2028", "\u0085",
          "\u200b", "\u2009", "\x0b", "\x0c", " \t\n \n  ", "\n\n\n    "]
MARKS = ["e\u0301", "a\u0308\u0323", "a\u0323\u0308", "o\u031b\u0309", "\u1100\u1161\u11a8", "각", "क\u093c", "\u0958", "Å", "Å",
         "\u0344", "q\u0307\u0323", "\u0301", " \u0301", "n\u0303o", "Ω", "ﬁ", "ǅ", "ẛ\u0323", "ʰˢ", "ªº", "가\u11a8",
         "x" + "\u0301" * 40, "e" + "\u0323\u0301" * 30, "\u1e9b\u0323", "豈", "﨟", "㎏", "e\u1df9\u0323", "q\u0301\u08d0\u0323", "\U00011935\U00011930", "\U0001e044", "\u32ff", "Ⅷ", "½", "²³", "①"]
APOS = ["it's", "IT'S", "we'Re", "they'LL", "'sx", "x's's", "'ſ", "I'ſt", "d'accord", "'tis", "''s", "’s", "rock'n'roll", "'l", "'",
        "y'all'd've", "A's", "АБВ's", "HTTPs'S", "ſ's", " 's", "\n's", "1's", "你's"]
DIGITS = ["0", "12", "123", "1234", "12345", "1,234.56", "3.14159", "2026-11-21", "٣٤٥٦٧", "१२३४", "x1y22z333", "1st", "²34", "½¾", "Ⅻ",
          "一二三", "00000000000000000000", "𝟘𝟙𝟚𝟛", " 42", "v1.2.3-rc4", "1 2 3", "１２３４"]


def rand_char(r):
    k = r.random()
    if k < 0.25:
        return chr(r.randrange(0x20, 0x7f))
    if k < 0.35:
        return r.choice(SPACES)
    lo, hi = r.choice([(0xa0, 0x250), (0x250, 0x370), (0x300, 0x370), (0x370, 0x530), (0x590, 0x700), (0x900, 0xe00), (0xe00, 0x1000),
                       (0x10d0, 0x1200), (0x1c80, 0x2000), (0x1e00, 0x2100), (0x2000, 0x2c00), (0x2c00, 0x3040), (0x3000, 0x3100),
                       (0x4e00, 0xa000), (0xa000, 0xac00), (0xac00, 0xd7a4), (0xf900, 0xfb50), (0xfb00, 0x10000), (0x10000, 0x10e00),
                       (0x10d40, 0x10d90), (0x11000, 0x12000), (0x16100, 0x16e00), (0x1cc00, 0x1d000), (0x1d000, 0x1e000),
                       (0x1e000, 0x1f000), (0x1f000, 0x1fc00), (0x20000, 0x20100), (0xe0000, 0xe0200), (0x0, 0x20)])
    c = r.randrange(lo, hi)
    return chr(c) if not 0xd800 <= c < 0xe000 else "x"


def piece(r, specials):
    k = r.randrange(12)
    if k < 3:
        words = r.choice(list(PROSE.values())).split(" ")
        return " ".join(r.choice(words) for _ in range(r.randrange(1, 8)))
    if k == 3:
        i = r.randrange(len(CODE))
        return CODE[i:i + r.randrange(1, 80)]
    if k == 4:
        i = r.randrange(len(EMOJI))
        return EMOJI[i:i + r.randrange(1, 6)]
    if k == 5:
        return "".join(r.choice(SPACES) for _ in range(r.randrange(1, 5)))
    if k == 6:
        return r.choice(MARKS)
    if k == 7:
        return r.choice(APOS)
    if k == 8:
        return r.choice(DIGITS)
    if k == 9:
        return r.choice(specials)
    if k == 10:
        return "".join(r.choice("!?.,;:-_/\\|<>[](){}#$%&*+=~^`'\"@。、「」！？…—·•§¶") for _ in range(r.randrange(1, 6)))
    return "".join(rand_char(r) for _ in range(r.randrange(1, 12)))


ALL_SPECIALS = sorted({a.content for f in FAMILIES.values() for a in f["added"]}) + ["<|im_", "<|", "words", "sword", " word ", "_word",
                                                                                       "word́", "[[[", "fine", "<s", "  <|left|>  ",
                                                                                       "\n<|right|> \n", " <|both|> ", "é<|both|>é"]


def texts(n, seed=7, specials=ALL_SPECIALS):
    r = random.Random(seed)
    out = ["", " ", "\n", "a", "Hello, world!", CODE, EMOJI, "a" * 300, "ab" * 200, "的" * 120, " " * 100 + "x", "\n" * 50 + " " * 7,
           "x" * 47, "x" * 48, "x" * 49, "=" * 64 + "\n"]
    out += list(PROSE.values()) + SPACES + MARKS + APOS + DIGITS + list(specials)
    while len(out) < n:
        out.append("".join(piece(r, specials) + r.choice(["", "", " ", " ", "\n"]) for _ in range(r.randrange(1, 9))))
    return out


def corpus():
    r = random.Random(11)
    words = [w for t in PROSE.values() for w in t.split(" ")]
    for _ in range(400):
        yield " ".join(r.choice(words) for _ in range(12)) + ".\n"
    for _ in range(20):
        yield CODE
        yield EMOJI + " " + " ".join(DIGITS)
        yield from PROSE.values()


def train(name, f):
    tok = Tokenizer(models.BPE())
    if "norm" in f:
        tok.normalizer = f["norm"]
    tok.pre_tokenizer = f["pre"]()
    tok.train_from_iterator(corpus(), trainers.BpeTrainer(
        vocab_size=900, min_frequency=2, show_progress=False, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())))
    tok.add_tokens(f["added"])
    for a in f["added"]:
        if a.special:
            tok.add_special_tokens([a])
    post = [processors.ByteLevel(trim_offsets=False)]
    if "bos" in f:
        eos = f.get("eos")
        post.append(processors.TemplateProcessing(
            single=f["bos"] + " $A" + (" " + eos if eos else ""),
            special_tokens=[(t, tok.token_to_id(t)) for t in [f["bos"], eos] if t]))
    tok.post_processor = processors.Sequence(post) if len(post) > 1 else post[0]
    tok.decoder = decoders.ByteLevel()
    d = json.loads(tok.to_str())
    m = d["model"]
    if f.get("ignore_merges"):
        # Words that no merge makes, so that the flag matters.
        m["ignore_merges"] = True
        m["merges"] = [p for p in m["merges"] if len("".join(p)) < 7 or hash_of(p) % 3]
    if f.get("string_merges"):
        m["merges"] = [" ".join(p) for p in m["merges"]]
    return d


def decoded(tok, seed=13):
    """What the package makes of ids: of whole texts, cut anywhere, and of any ids at all."""
    r = random.Random(seed)
    size = tok.get_vocab_size()
    added = sorted(tok.get_added_tokens_decoder())
    some = [EMOJI, CODE, "的" * 5 + " naïve café\n"] + list(PROSE.values()) + list(ALL_SPECIALS)
    lists = []
    for t in some:
        ids = tok.encode(t, add_special_tokens=False).ids
        lists += [ids, ids[:r.randrange(len(ids) + 1)], ids[r.randrange(len(ids) + 1):]]
    for _ in range(100):
        lists.append([r.choice(added) if added and r.random() < 0.2 else r.randrange(size) for _ in range(r.randrange(1, 12))])
    lists += [[a] for a in added] + [[i] for i in range(size)]
    return [{"ids": ids, "text": tok.decode(ids, skip_special_tokens=True), "whole": tok.decode(ids, skip_special_tokens=False)} for ids in lists]


def hash_of(pair):
    return sum(ord(c) for c in "".join(pair))


def main():
    if sys.argv[1] == "--bench":
        tok = Tokenizer.from_file(sys.argv[2])
        text = pathlib.Path(sys.argv[3]).read_text()
        best = 1e9
        for _ in range(3):
            tok = Tokenizer.from_file(sys.argv[2])
            t = time.process_time()
            ids = tok.encode(text, add_special_tokens=False).ids
            best = min(best, time.process_time() - t)
        warm = 1e9
        for _ in range(3):
            t = time.process_time()
            tok.encode(text, add_special_tokens=False)
            warm = min(warm, time.process_time() - t)
        n = len(text.encode())
        print(f"{n} bytes, {len(ids)} tokens: cold {n / best / 1e6:.2f} MB/s {len(ids) / best / 1e6:.2f} Mtok/s, second {n / warm / 1e6:.2f} MB/s")
        return
    if sys.argv[1] == "--vectors":
        tok = Tokenizer.from_file(sys.argv[2])
        added = [t.content for t in tok.get_added_tokens_decoder().values()]
        count = int(sys.argv[4]) if len(sys.argv) > 4 else 20000
        with open(sys.argv[3], "w") as out:
            for t in texts(count, seed=count, specials=added + ALL_SPECIALS):
                out.write(json.dumps({"text": t, "ids": tok.encode(t, add_special_tokens=False).ids,
                                      "special": tok.encode(t).ids}) + "\n")
        return
    out = pathlib.Path(sys.argv[1])
    sample = texts(700)
    (out / "texts.json").write_text(json.dumps(sample, ensure_ascii=True, indent=0) + "\n")
    for name, f in FAMILIES.items():
        (out / name).mkdir(exist_ok=True)
        path = out / name / "tokenizer.json"
        path.write_text(json.dumps(train(name, f), ensure_ascii=False, separators=(",", ":")) + "\n")
        tok = Tokenizer.from_file(str(path))
        lines = []
        for t in sample:
            ids = tok.encode(t, add_special_tokens=False).ids
            lines.append(json.dumps(ids, separators=(",", ":")))
        (out / name / "ids.json").write_text("[\n" + ",\n".join(lines) + "\n]\n")
        (out / name / "special.json").write_text(json.dumps(tok.encode("Hello, world!").ids) + "\n")
        rows = [json.dumps(d, ensure_ascii=True, separators=(",", ":")) for d in decoded(tok)]
        (out / name / "decoded.json").write_text("[\n" + ",\n".join(rows) + "\n]\n")
        print(name, tok.get_vocab_size(), "tokens,", len(sample), "texts,", path.stat().st_size, "bytes")


main()
