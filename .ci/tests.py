"""Reads `go test -json` and prints what became of the tests: a line for each
package, the output of what failed, and each test that was skipped, with why. It
fails when a test failed, and when one was skipped that the list of expected skips
(the argument) does not have: a check that nobody runs is none."""

import fnmatch
import json
import sys

MODULE = "github.com/dynctl/dynctl/"


def expected(path):
    """The lines of the list: package and test as patterns, then why."""
    for line in open(path, encoding="utf-8"):
        if line.strip() and not line.startswith("#"):
            package, test, why = line.split(None, 2)
            yield package, test, why.strip()


def main(path):
    allowed = list(expected(path))
    output, skipped, failed = {}, [], False
    for line in sys.stdin:
        if not line.startswith("{"):  # of the go command itself
            sys.stdout.write(line)
            continue
        e = json.loads(line)
        action, package = e["Action"], e.get("Package", e.get("ImportPath", ""))
        package = package.removeprefix(MODULE)
        key = package, e.get("Test", "")
        if action in ("output", "build-output"):
            output.setdefault(key, []).append(e["Output"])
        elif action in ("fail", "build-fail"):
            failed = True
            print(f"FAIL {package} {key[1]}")
            sys.stdout.writelines(output.pop(key, []))
        elif action == "skip" and key[1]:
            said = [t.strip() for t in output.pop(key, []) if not t.lstrip().startswith(("=== ", "--- "))]
            skipped.append((*key, " ".join(said)))
        elif action == "pass" and not key[1]:
            print(f"ok   {package} {e.get('Elapsed', 0):.1f}s", flush=True)
        if action in ("pass", "skip"):
            output.pop(key, None)
    print(f"\n{len(skipped)} skipped")
    for package, test, said in skipped:
        why = [w for p, t, w in allowed if fnmatch.fnmatchcase(package, p) and fnmatch.fnmatchcase(test, t)]
        print(f"  {package} {test}: {why[0] if why else 'NOT EXPECTED: ' + said}")
        failed = failed or not why
    if failed:
        sys.exit(f"a test failed, or was skipped although {path} does not expect it")


main(sys.argv[1])
