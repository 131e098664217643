"""The shape of the file: lines, code lines per function, arguments, and the length of the part that must be trusted."""
import ast
import io
import statistics
import sys
import tokenize

SOURCE = open("batch_harness.py", encoding="utf-8").read()
LONGEST, MOST_ARGUMENTS = 50, 7          # self included

skip = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
code = {token.start[0] for token in tokenize.generate_tokens(io.StringIO(SOURCE).readline) if token.type not in skip}
rows = []
for node in ast.walk(ast.parse(SOURCE)):
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        lines = {n for n in code if node.lineno <= n <= node.end_lineno}
        if ast.get_docstring(node):
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
        rows.append((len(lines), node.name, len(node.args.args) + len(node.args.kwonlyargs)))
sizes = sorted(size for size, _, _ in rows)
trusted = SOURCE[:SOURCE.index("# THE TRUST LINE.")].count("\n")
print("%d lines, %d above the trust line; %d functions, code lines median %d, p90 %d, longest %d" % (
    SOURCE.count("\n"), trusted, len(rows), statistics.median(sizes), sizes[int(len(sizes) * 0.9)], sizes[-1]))
wrong = [row for row in rows if row[0] > LONGEST or row[2] > MOST_ARGUMENTS]
for size, name, arguments in wrong:
    print("%s: %d code lines, %d arguments" % (name, size, arguments))
sys.exit(1 if wrong else 0)
