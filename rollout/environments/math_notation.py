"""Notation of math answers: boxes, and rewriting into the LaTeX that math-verify reads.

math-verify ignores notation that it cannot read: `1-\\frac{1}{\\mathrm{e}}` is 1 for it, and
`4\\sqrt(2)` is 4. `normalize_answer` rewrites such notation in a form that it can read.
"""

import re
import unicodedata

from rollout.environments.math_numbers import rewrite_numbers

# Stands for a blank between two numbers, which must not become one number.
_BLANK_BETWEEN_NUMBERS = "␣"

_BOX_START = re.compile(r"\\(?:boxed|fbox)\s*(?=[{])")
# Blanks of LaTeX, without `\,` and `\!`, which group digits: `12\,000`.
_LATEX_BLANK = re.compile(r"(?<!\\)\\[;: ]|\\q?quad(?![a-zA-Z])")
_SPACING = re.compile(
    r"(?<!\\)\\[,!]|\\(?:left|right|displaystyle)(?![a-zA-Z])|\\?\$"
    r"|(?P<command>\\[a-zA-Z]+)\s+(?=[a-zA-Z])|\s"
)
_MIXED_NUMBER = re.compile(r"(?<![\d.,/^_{}])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d/.])")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:\s\d{3})+(?![\d.]|\s\d)")
_SHORT_SCRIPT = re.compile(r"([_^])(\d)\s+(?=\d)")  # `\log_2 8`, `2^3 5`
_SPACED_DIGITS = re.compile(r"(?<=\d)\s+(?=\d)")
_UPRIGHT_LETTER = re.compile(
    r"\\(?:mathrm|mathit|mathbf|operatorname|textrm|textit|text|rm)\s*(?:\{\s*([ei])\s*\}|\s([ei])(?![a-zA-Z]))"
)
_ROOT = re.compile(r"(?P<sign>\\sqrt|(?<![a-zA-Z\\])sqrt|[√∛∜])\s*(?=\(|(?P<token>\d+|[a-zA-Z]))")
_ROOT_COMMANDS = {"∛": "\\sqrt[3]", "∜": "\\sqrt[4]"}
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
    (
        re.compile(r"(?<![a-zA-Z\\])((?:arc)?(?:sin|cos|tan)|cot|sec|csc|ln|exp)(?=\s*\()"),
        r"\\\1",
    ),
)
_SYSTEM = re.compile(
    r"(?:\\\{|\\lbrace)?\s*\\begin\{(?P<name>array|cases|aligned)\}(?:\{[^{}]*\})?"
    r"(?P<rows>.*?)\\end\{(?P=name)\}\s*(?:\\right)?\.?",
    re.DOTALL,
)
_LEFT = re.compile(r"\\left(?![a-zA-Z])")  # not \leftarrow
_DELIMITERS = re.compile(r"\s*\\(?:\((?P<inline>.*)\\\)|\[(?P<display>.*)\\\])\s*\.?\s*", re.DOTALL)
_FONT = r"\\(?:mathbf|boldsymbol|bm|textbf|bold|mathit|color\{[a-z]+\}|textcolor\{[a-z]+\})"
_WHOLE_IN_FONT = re.compile(rf"\s*{_FONT}\s*\{{([^{{}}]*)\}}\s*")
_NUMBER_IN_FONT = re.compile(rf"{_FONT}\s*\{{\s*(-?[\d.]+)\s*\}}")
_ABOUT = re.compile(r"^\s*(?:\\approx(?![a-zA-Z])|≈)\s*")
_TRIGONOMETRY = re.compile(r"(?<![a-zA-Z])\\?(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?|(?<![a-zA-Z\\])[a-zA-Z])\s*\^\s*\{?\s*\\circ\s*\}?")
_TEMPERATURE = re.compile(
    r"(\^\{?\s*\\circ\s*\}?)\s*(?:\\(?:text|mathrm)\{\s*)?([CF])(?![a-zA-Z])\s*\}?"
)
_ALL_REALS = re.compile(
    r"\s*(?:\\(?:text|mathrm|mbox)\{)?\s*all\s+(?:real\s+numbers|reals)\s*\}?\s*", re.IGNORECASE
)
_SET_BUILDER = re.compile(
    r"\\\{([a-zA-Z])(?:\\in\s*\\mathbb\{R\})?(?:\||:|\\(?:mid|vert)(?![a-zA-Z]))"
    r"(?P<condition>[^|:]*)\\\}"
)
_RELATION = re.compile(r"[<>]|\\(?:le|ge|ne|lt|gt)(?:q|qslant)?(?![a-zA-Z])")
_INTERVAL = re.compile(
    r"(?:(?<![\d}\w)])|(?<=cup)|(?<=cap)|(?<=\\in))([\[\]])([^\[\](),]*),([^\[\](),]*)([\[\]])"
)
_UNION_LETTER = re.compile(r"(?<=[)\]])\s*U\s*(?=[(\[])")
_NAMED_POINT = re.compile(r"[A-Z](\([^()]*,[^()]*\))")
_MODULUS = re.compile(
    r"(?P<bracket>\(\s*)?(?:\\[pb]?mod|\\(?:text|mathrm|mbox)\{\s*mod\s*\}|(?<![a-zA-Z\\])mod)"
    r"(?![a-zA-Z])\s*(?:\{\s*(?P<braced>[\w^+*-]+)\s*\}|(?P<number>\d+|[a-z](?![a-zA-Z])))"
    r"(?(bracket)\s*\))"
)
_COLUMN = re.compile(r"\\begin\{(?P<name>[pbB]?matrix)\}(?P<cells>[^&]*)\\end\{(?P=name)\}")
_ROWS_OF_LISTS = re.compile(r"\[(\[[^\[\]]*\](?:,\[[^\[\]]*\])*)\]")
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
    "≡": "\\equiv ",
    "∈": "\\in ",
    "∅": "\\emptyset ",
    "ℝ": "\\mathbb{R}",
    "\\varnothing": "\\emptyset ",
    "~": " ",
}
_SUPERSCRIPTS = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+")
_SUPERSCRIPT_DIGITS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_VULGAR_FRACTION = re.compile("(\\d*)([¼½¾⅐-⅞])")


def last_boxed(text: str) -> str | None:
    """Return the content of the last `\\boxed{...}` of a reply, or None.

    The text up to the last `</think>` is ignored. Braces that LaTeX shows, `\\{` and `\\}`, are not
    counted. A last box that never closes is no answer, even if an earlier one closed.
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
    """Rewrite an answer in the LaTeX that math-verify reads, and remove its blanks.

    Notation for which there is no such LaTeX stays as it is. A blank stays after a command that a
    letter follows (`\\pi r`); one between two numbers becomes `␣`.
    """
    text = _rewrite_systems(_unwrap(answer))
    for written, command in _COMMANDS.items():
        text = text.replace(written, command)
    text = rewrite_numbers(text)
    text = _SUPERSCRIPTS.sub(
        lambda match: "^{" + match[0].translate(_SUPERSCRIPT_DIGITS) + "}", text
    )
    text = _VULGAR_FRACTION.sub(_write_vulgar_fraction, text)
    text = _UPRIGHT_LETTER.sub(lambda match: match[1] or match[2], text)
    text = _rewrite_spaced_digits(_LATEX_BLANK.sub(" ", text))
    text = _rewrite_words(text)
    text = _rewrite_roots(text)
    text = _POWER_IN_BRACKETS.sub(r"^{\1}", text)
    text = _MODULUS.sub(lambda match: f"\\pmod{{{match['braced'] or match['number']}}}", text)
    text = _rewrite_degrees(text)
    text = _SPACING.sub(lambda match: f"{match['command']} " if match["command"] else "", text)
    text = text.replace("+-", "-")
    only_text = _ONLY_TEXT.fullmatch(text)
    if only_text:
        text = only_text[1]
    return _rewrite_sets(text.rstrip(".").removeprefix("+"))


def _unwrap(answer: str) -> str:
    """Return an answer without delimiters of formulas, fonts, and a sign for approximate values.

    The words "all real numbers" become `\\mathbb{R}`.
    """
    text = answer
    delimiters = _DELIMITERS.fullmatch(text)
    if delimiters:
        text = delimiters["inline"] or delimiters["display"] or ""
    if _ALL_REALS.fullmatch(text):
        return "\\mathbb{R}"
    whole = _WHOLE_IN_FONT.fullmatch(text)
    if whole:
        text = whole[1]
    return _ABOUT.sub("", _NUMBER_IN_FONT.sub(r"\1", text))


def _rewrite_spaced_digits(text: str) -> str:
    """Rewrite blanks between digits: of mixed numbers, thousands such as `12 000`, and `\\log_2 8`.

    Other digits get _BLANK_BETWEEN_NUMBERS between them, so that `3 5` does not become 35 when blanks
    are removed.
    """
    text = _MIXED_NUMBER.sub(r"(\1+\\frac{\2}{\3})", text)
    text = _THOUSANDS.sub(lambda match: re.sub(r"\s", "", match[0]), text)
    text = _SHORT_SCRIPT.sub(r"\1{\2}", text)
    return _SPACED_DIGITS.sub(_BLANK_BETWEEN_NUMBERS, text)


def _rewrite_words(text: str) -> str:
    """Write `or`, `and`, `pi`, `infinity` and names of functions as commands."""
    text = _OR_AND.sub(
        lambda match: _JUNCTIONS[match["marked"] or match["word"] or match["sign"]], text
    )
    for word, command in _WORDS:
        text = word.sub(command, text)
    return text


def _rewrite_degrees(text: str) -> str:
    """Write the unit of a temperature as text, and degrees beside a trigonometric function in radians."""
    text = _TEMPERATURE.sub(r"\1\\text{\2}", text)
    if _TRIGONOMETRY.search(text):
        text = _DEGREES.sub(r"(\\frac{\1\\pi }{180})", text)
    return text


def _rewrite_roots(text: str) -> str:
    """Write roots whose radicand has no braces, such as `sqrt(2+(3))` and `∛8`, with braces."""
    parts: list[str] = []
    position = 0
    while match := _ROOT.search(text, position):
        sign = match["sign"]
        parts += [text[position : match.start()], _ROOT_COMMANDS.get(sign, "\\sqrt")]
        position = match.end()
        if match["token"]:
            parts.append(f"{{{match['token']}}}")
            position += len(match["token"])
            continue
        end = _closing_bracket(text, position)
        parts.append(f"{{{_rewrite_roots(text[position + 1 : end])}}}")
        position = end + 1
    return "".join([*parts, text[position:]])


def _closing_bracket(text: str, start: int) -> int:
    """Return the position of the bracket that closes the one at `start`; the length of the text if none does."""
    depth = 0
    for position in range(start, len(text)):
        if text[position] == "(":
            depth += 1
        elif text[position] == ")":
            depth -= 1
        if depth == 0:
            return position
    return len(text)


def _rewrite_sets(text: str) -> str:
    """Write sets, intervals, points and matrices of other notations in that of math-verify.

    Args:
        text: an answer without blanks.
    """
    builder = _SET_BUILDER.fullmatch(text)
    if builder and "=" not in builder["condition"] and _RELATION.search(builder["condition"]):
        text = builder["condition"]
    text = _UNION_LETTER.sub(r"\\cup ", text)
    text = _INTERVAL.sub(_write_interval, text)
    point = _NAMED_POINT.fullmatch(text)
    if point:
        text = point[1]
    column = _COLUMN.fullmatch(text)
    if column and "\\\\" in column["cells"]:
        elements = column["cells"].replace("\\\\", ",")
        text = f"({elements})"
    rows = _ROWS_OF_LISTS.fullmatch(text)
    if rows:
        cells = rows[1][1:-1].replace("],[", "\\\\").replace(",", "&")
        text = f"\\begin{{pmatrix}}{cells}\\end{{pmatrix}}"
    return text


def _write_interval(match: re.Match[str]) -> str:
    """Return an interval with round brackets at its open bounds: `(0,1)` for `]0,1[`."""
    opening, low, high, closing = match.groups()
    left = "(" if opening == "]" else "["
    right = ")" if closing == "[" else "]"
    return f"{left}{low},{high}{right}"


def _write_vulgar_fraction(match: re.Match[str]) -> str:
    """Return a fraction of one character as LaTeX, with the whole number before it."""
    whole, character = match.groups()
    numerator, _, denominator = unicodedata.normalize("NFKC", character).partition("⁄")
    fraction = f"\\frac{{{numerator}}}{{{denominator}}}"
    return f"({whole}+{fraction})" if whole else fraction


def _rewrite_systems(text: str) -> str:
    """Write a system of equations, in an array, cases or aligned, as a list of its equations.

    Every `\\left` of the text is removed.
    """

    def as_list(match: re.Match[str]) -> str:
        """Return the rows joined by commas if all of them are equations; else return the system."""
        rows = [row.replace("&", "").strip(" ,;\n") for row in match["rows"].split("\\\\")]
        filled_rows = [row for row in rows if row]
        if all(row.count("=") == 1 for row in filled_rows):
            return ",".join(filled_rows)
        return match[0]

    # Otherwise the `\left` of `\left\{` would stay before the list of equations.
    without_left = _LEFT.sub("", text)
    return _SYSTEM.sub(as_list, without_left)
