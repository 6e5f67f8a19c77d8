"""Trains a SentencePiece BPE tokenizer in the form that NeMo reads, on the texts of a data set.

python scripts/train_tokenizer.py --data data/synthetic examples/voice_prompts --vocab-size 128 --output DIR
"""

import argparse
import sys
import tempfile
from pathlib import Path

from finetune.data.sources import open_source, parse_sources
from finetune.data.text import normalize_text
from finetune.errors import UserError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", required=True, help="data sets whose train split is read")
    parser.add_argument("--vocab-size", type=int, default=128, help="number of pieces")
    parser.add_argument("--normalization", default="basic", choices=("none", "lower", "basic"))
    parser.add_argument("--output", type=Path, required=True, help="directory for tokenizer.model and vocab.txt")
    arguments = parser.parse_args()
    try:
        sources = [open_source(s, "--data") for s in parse_sources(list(arguments.data), "--data", "train")]
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    import sentencepiece

    arguments.output.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        for source in sources:
            column = source.columns["text"]
            for shard in source.shards:
                texts = (row.get(column) for _, row in shard.read(0))
                file.writelines(
                    normalize_text(text, arguments.normalization) + "\n" for text in texts if isinstance(text, str)
                )
        file.flush()
        sentencepiece.SentencePieceTrainer.train(
            input=file.name,
            model_prefix=str(arguments.output / "tokenizer"),
            vocab_size=arguments.vocab_size,
            model_type="bpe",
            character_coverage=1.0,
            bos_id=-1,
            eos_id=-1,
            unk_id=0,
            minloglevel=2,
        )
    processor = sentencepiece.SentencePieceProcessor(model_file=str(arguments.output / "tokenizer.model"))
    pieces = [processor.id_to_piece(i) for i in range(1, processor.get_piece_size())]
    # NeMo wants the pieces in WordPiece's spelling beside the model.
    words = [piece[1:] if piece.startswith("\u2581") else f"##{piece}" for piece in pieces]
    (arguments.output / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    print(f"{processor.get_piece_size()} pieces in {arguments.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
