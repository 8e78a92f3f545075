"""Notation of math answers: boxes, and rewriting into the LaTeX that math-verify reads.

math-verify ignores notation that it cannot read: `1-\\frac{1}{\\mathrm{e}}` is 1 for it, and
`4\\sqrt(2)` is 4. `normalize_answer` rewrites such notation in a form that it can read.
"""

import re
import unicodedata

NO_NUMBER = "␣"  # stands for a blank between digits that are no mixed number

_BOX_START = re.compile(r"\\(?:boxed|fbox)\s*(?=[{])")
_SPACING = re.compile(
    r"(?<!\\)\\[,;:! ]|\\(?:left|right|displaystyle|quad|qquad)(?![a-zA-Z])|\\?\$"
    r"|(?P<command>\\[a-zA-Z]+)\s+(?=[a-zA-Z])|\s"
)
_MIXED_NUMBER = re.compile(r"(?<![\d.,/^_{}])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d/.])")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:\s\d{3})+(?![\d.]|\s\d)")
_SHORT_SCRIPT = re.compile(r"([_^])(\d)\s+(?=\d)")  # `\log_2 8`, `2^3 5`
_SPACED_DIGITS = re.compile(r"(?<=\d)\s+(?=\d)")
_UPRIGHT_LETTER = re.compile(
    r"\\(?:mathrm|mathit|mathbf|operatorname|textrm|textit|text|rm)\s*(?:\{\s*([ei])\s*\}|\s([ei])(?![a-zA-Z]))"
)
_ROOT = re.compile(
    r"(?:\\sqrt|(?<![a-zA-Z\\])sqrt|√)\s*(?:\((?P<bracket>[^()]*)\)|(?P<token>\d+|[a-zA-Z]))"
)
_POWER_IN_BRACKETS = re.compile(r"\^\(([^()]*)\)")
_ONLY_TEXT = re.compile(r"\\(?:text|textrm|textbf|mathrm|mbox)\{([^{}]*)\}")
_OR_AND = re.compile(
    r"\\(?:text|textrm|mathrm|mbox)\{\s*(?P<marked>or|and)\s*\}"
    r"|(?<![a-zA-Z\\])(?P<word>or|and)(?![a-zA-Z])|\\(?P<sign>vee|wedge)(?![a-zA-Z])"
)
_JUNCTIONS = {"or": "\\lor ", "vee": "\\lor ", "and": "\\land ", "wedge": "\\land "}
_WORDS = (
    (re.compile(r"(?<![a-zA-Z\\])pi(?![a-zA-Z])"), r"\\pi "),
    (re.compile(r"(?<![a-zA-Z\\])(?:infinity|infty|oo)(?![a-zA-Z])"), r"\\infty "),
)
_SYSTEM = re.compile(
    r"(?:\\\{|\\lbrace)?\s*\\begin\{(?P<name>array|cases|aligned)\}(?:\{[^{}]*\})?"
    r"(?P<rows>.*?)\\end\{(?P=name)\}\s*(?:\\right)?\.?",
    re.DOTALL,
)
_COMMANDS = {
    "\\dfrac": "\\frac",
    "\\tfrac": "\\frac",
    "\\cfrac": "\\frac",
    "\\lbrace": "\\{",
    "\\rbrace": "\\}",
    "\\langle": "(",
    "\\rangle": ")",
    "⟨": "(",
    "⟩": ")",
    "**": "^",
    "−": "-",
    "×": "\\times ",
    "·": "\\cdot ",
    "÷": "\\div ",
    "π": "\\pi ",
    "∞": "\\infty ",
    "∪": "\\cup ",
    "∩": "\\cap ",
    "≤": "\\le ",
    "≥": "\\ge ",
    "≠": "\\ne ",
    "°": "^\\circ ",
}
_SUPERSCRIPTS = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+")
_SUPERSCRIPT_DIGITS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_VULGAR_FRACTION = re.compile("(\\d*)([¼½¾⅐-⅞])")


def last_boxed(text: str) -> str | None:
    """Return the content of the last `\\boxed{...}` after any thought, or None.

    Braces that LaTeX shows, `\\{` and `\\}`, are not counted. A last box that never closes is no
    answer, even if an earlier one closed.
    """
    text = text.rpartition("</think>")[2]
    boxes = list(_BOX_START.finditer(text))
    if not boxes:
        return None
    start = boxes[-1].end()
    depth = 0
    position = start
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 2  # the next character belongs to a command, or is shown as it is
            continue
        if character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return text[start + 1 : position].strip()
        position += 1
    return None


def normalize_answer(answer: str) -> str:
    """Return an answer in one notation, without blanks: that of math-verify wherever it is known."""
    text = _rewrite_systems(answer)
    for written, command in _COMMANDS.items():
        text = text.replace(written, command)
    text = _SUPERSCRIPTS.sub(lambda m: "^{" + m[0].translate(_SUPERSCRIPT_DIGITS) + "}", text)
    text = _VULGAR_FRACTION.sub(_write_vulgar_fraction, text)
    text = _UPRIGHT_LETTER.sub(lambda match: match[1] or match[2], text)
    text = _MIXED_NUMBER.sub(r"(\1+\\frac{\2}{\3})", text)
    text = _THOUSANDS.sub(lambda match: re.sub(r"\s", "", match[0]), text)
    text = _SHORT_SCRIPT.sub(r"\1{\2}", text)
    text = _SPACED_DIGITS.sub(NO_NUMBER, text)
    text = _OR_AND.sub(
        lambda match: _JUNCTIONS[match["marked"] or match["word"] or match["sign"]], text
    )
    for word, command in _WORDS:
        text = word.sub(command, text)
    text = _ROOT.sub(lambda match: "\\sqrt{" + (match["bracket"] or match["token"]) + "}", text)
    text = _POWER_IN_BRACKETS.sub(r"^{\1}", text)
    text = re.sub(r"\\(p?mod)\s*(\d)(?!\d)", r"\\\1{\2}", text)
    text = _SPACING.sub(lambda match: f"{match['command']} " if match["command"] else "", text)
    text = text.replace("+-", "-")
    only_text = _ONLY_TEXT.fullmatch(text)
    if only_text:
        text = only_text[1]
    return text.rstrip(".").removeprefix("+")


def _write_vulgar_fraction(match: re.Match[str]) -> str:
    """Return a fraction of one character as LaTeX, with the whole number before it."""
    whole, character = match.groups()
    numerator, _, denominator = unicodedata.normalize("NFKC", character).partition("⁄")
    fraction = f"\\frac{{{numerator}}}{{{denominator}}}"
    return f"({whole}+{fraction})" if whole else fraction


def _rewrite_systems(text: str) -> str:
    """Write a system of equations, in an array or cases, as a list of its equations."""

    def as_list(match: re.Match[str]) -> str:
        rows = [row.replace("&", "").strip(" ,;\n") for row in match["rows"].split("\\\\")]
        equations = [row for row in rows if row]
        if all(row.count("=") == 1 for row in equations):
            return ",".join(equations)
        return match[0]

    return _SYSTEM.sub(as_list, text.replace("\\left", ""))
