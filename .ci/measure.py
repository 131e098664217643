"""The shape of the two files, by rulers that may only get better: each with what the last landing had, and the aim.

A token is one of tokenize's, without comments, docstrings and line ends; a code line is a line that holds one.
"""
import ast
import io
import statistics
import sys
import tokenize

NOT_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

# ruler -> (held: what the last landing had, the aim)
RULERS = {
    "tokens": (69_850, 48_000),
    "tokens a code line": (10.2, 10.5),
    "characters a code line": (42.3, 44),
    "longest line": (100, 100),
    "function, median": (9, 8),
    "function, p90": (23, 26),
    "function, longest": (42, 50),
    "most arguments": (6, 6),
    "classes": (59, 40),
    "conditional expressions a 1000 code lines": (8.2, 30),
    "lines above the trust line": (1453, 1150),
    "functions that take the untyped options": (0, 0),
    "test tokens": (77_650, 52_000),
    "longest test line": (100, 100),
}


def docstrings(tree):
    """The lines of docstrings."""
    lines = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)) and ast.get_docstring(node) is not None:
            lines.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return lines


def code_of(source, tree):
    """The tokens that are code."""
    skipped = docstrings(tree)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [token for token in tokens if token.type not in NOT_CODE and token.start[0] not in skipped]


def measured(source, tests):
    """Every ruler's figure, and the functions by their code lines."""
    tree = ast.parse(source)
    tokens = code_of(source, tree)
    lines = {token.start[0] for token in tokens}
    text = source.split("\n")
    functions = []
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS):
            length = sum(node.lineno <= line <= node.end_lineno for line in lines)
            functions.append((length, node.name, len(node.args.args) + len(node.args.kwonlyargs), node.lineno))
    lengths = sorted(length for length, *_ in functions)
    conditional = sum(isinstance(node, ast.IfExp) for node in ast.walk(tree))
    untyped = [name for _, name, _, line in functions if "argparse.Namespace" in "".join(text[line - 1:line + 2])]
    figures = {
        "tokens": len(tokens),
        "tokens a code line": len(tokens) / len(lines),
        "characters a code line": sum(len(text[line - 1].strip()) for line in lines) / len(lines),
        "longest line": max(map(len, text)),
        "function, median": statistics.median(lengths),
        "function, p90": lengths[int(len(lengths) * 0.9)],
        "function, longest": lengths[-1],
        "most arguments": max(arguments for _, _, arguments, _ in functions),
        "classes": sum(isinstance(node, ast.ClassDef) for node in ast.walk(tree)),
        "conditional expressions a 1000 code lines": 1000 * conditional / len(lines),
        "lines above the trust line": source[:source.index("# THE TRUST LINE.")].count("\n"),
        "functions that take the untyped options": len(untyped),
        "test tokens": len(code_of(tests, ast.parse(tests))),
        "longest test line": max(map(len, tests.split("\n"))),
    }
    return figures, functions


def main():
    with open("batch_harness.py", encoding="utf-8") as file:
        source = file.read()
    with open("test_batch_harness.py", encoding="utf-8") as file:
        tests = file.read()
    figures, functions = measured(source, tests)
    worse = 0
    for name, (held, aim) in RULERS.items():
        figure = round(figures[name], 1)
        wrong = figure > max(held, aim)
        worse += wrong
        print("%-42s %8.4g  held %8.4g  aim %8.4g%s" % (name, figure, held, aim, "  WORSE" if wrong else ""))
    for length, name, arguments, line in functions:
        if length > RULERS["function, longest"][0] or arguments > RULERS["most arguments"][0]:
            print("  line %d, %s: %d code lines, %d arguments" % (line, name, length, arguments))
    if "--rooms" in sys.argv:
        rooms(source)
    return 1 if worse else 0


def rooms(source):
    """Lines and tokens of each section, by its banner."""
    lines = source.split("\n")
    starts = [n for n, line in enumerate(lines, 1) if line.startswith("# ===") and lines[n].startswith("# ")]
    starts = [1] + [n for n in starts if lines[n].split(".")[0][2:].replace(",", "").replace(" ", "").isupper()]
    tokens = code_of(source, ast.parse(source))
    for start, end in zip(starts, starts[1:] + [len(lines) + 1]):
        room = sum(start <= token.start[0] < end for token in tokens)
        print("  %-40s %5d lines %6d tokens" % (lines[start].split(".")[0][2:42], end - start, room))


if __name__ == "__main__":
    sys.exit(main())
