"""The demo's tokenizer: one id per word of the grammar, plus padding, start, end and unknown.

It puts `<bos>` in front of a text and never appends `<eos>`, so an encoded prompt is an opening that the
model goes on writing. Padding is on the left for the same reason: every prompt ends in the last column.

A word carries the space before it, as in the tokenizers of large models. A response decoded on its own then
begins with that space, and prompt + response reads right wherever somebody glues the two together, as the
text-generation pipeline of transformers does. Words that open sentences have a second id, without the space.
"""

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from coati.demo.grammar import can_continue, vocabulary

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"

CONTEXT_LENGTH = 64
"""Tokens that the demo's model can see; the longest sentence of the grammar is under a third of it."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the word-level tokenizer of the film grammar.

    Example:
        >>> tokenizer = build_tokenizer()
        >>> ids = tokenizer("The film was good.").input_ids
        >>> tokenizer.decode(ids, skip_special_tokens=True)
        'the film was good .'
    """
    openers = [word for word in vocabulary() if can_continue(word)]
    tokens = [PAD, BOS, EOS, UNK, *openers, *(f" {word}" for word in vocabulary())]
    ids = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.WordLevel(vocab=ids, unk_token=UNK))
    # People type "The film was good."; the language is lower case, with a space before the full stop.
    backend.normalizer = normalizers.Sequence(
        [
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"\s*\."), " ."),
            normalizers.Replace(Regex(r"\s+"), " "),
            normalizers.Strip(left=False, right=True),
        ]
    )
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?[^ ]+"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, ids[BOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        padding_side="left",
        model_max_length=CONTEXT_LENGTH,
        # The clean-up would glue the full stop to the word before it, and texts would not round-trip.
        clean_up_tokenization_spaces=False,
    )
