"""Text of a reply while its tokens arrive, and the search for stops in it."""

from collections.abc import Collection, Sequence

from tokenizers.decoders import DecodeStream

from rollout.models.chat_template import Renderer
from rollout.models.tool_calls import CALL_SPLITTERS, split_thoughts

_THOUGHT_START = "<think>"


class ReplyText:
    """Text of a reply that is being sampled, token by token.

    If the prompt has opened a thought, the text begins with `<think>`.

    Attributes:
        end: number of tokens up to and including the token that completes the first stop; 0 if
            there is no stop yet. Stops inside thoughts and tool calls do not count.
    """

    def __init__(
        self,
        renderer: Renderer,
        prompt_ids: Sequence[int],
        *,
        calls: bool,
        stops: Collection[str] = (),
    ) -> None:
        """Begin a reply to a prompt.

        Args:
            renderer: renderer of the model.
            prompt_ids: token ids of the prompt.
            calls: True if the reply may call tools. The text then ends at the first special token,
                which may begin a call.
            stops: texts that end the reply.
        """
        self._renderer = renderer
        self._calls = calls
        self._stops = stops
        # New text is searched for stops together with this many characters before it, because a stop may
        # begin in these. They may also contain a whole stop that was not found before: while the reply is
        # only "<th", it may still become "<think>", and `split_thoughts` returns no text for it.
        self._searched_chars = max(map(len, stops), default=0) + len("<think")
        self._prompt_opens_thought = renderer.prompt_end(prompt_ids).endswith(_THOUGHT_START)
        self._begin()

    def _begin(self) -> None:
        self.end = 0
        self._stream = DecodeStream(skip_special_tokens=True)
        self._text = _THOUGHT_START if self._prompt_opens_thought else ""
        self._has_call_token = False

    def add(self, position: int, token_ids: Sequence[int]) -> str:
        """Add the tokens from `position` on, and return the text so far.

        Position 0 begins the reply again. Tokens behind the `end` are ignored.
        """
        if position == 0:
            self._begin()
        for token_count, token in enumerate(token_ids, position + 1):
            if self.end:
                break
            new_text = self._renderer.decode_next(self._stream, token)
            is_special = new_text is None
            if is_special and self._calls:
                self._has_call_token = True
            if new_text and not self._has_call_token:
                self._text += new_text
                if self._has_stop(len(new_text)):
                    self.end = token_count
        return self._text

    def _has_stop(self, new_chars: int) -> bool:
        """Return True if the text has a stop outside thoughts and tool calls.

        The text is not split and searched unless its end has a stop: the `new_chars` characters since
        the last call, and some before them.
        """
        tail = self._text[-(new_chars + self._searched_chars) :]
        if not any(stop in tail for stop in self._stops):
            return False
        _, text = split_thoughts(self._text)
        if self._calls:
            split = CALL_SPLITTERS[self._renderer.tool_format]
            text, _ = split(text)
            text = text.lstrip()  # the text of the complete reply is stripped too
        return any(stop in text for stop in self._stops)
