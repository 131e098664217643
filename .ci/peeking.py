"""Whether `safe` and `not safe` are said wrongly too often by one who looks again and again.

    python3 .ci/peeking.py [RUNS]         2,000 runs unless told; exit 1 when more than 5 % are wrong

A run is 400 calls at size 2 of which the truth lies 0.05 points beyond a limit, looked at every 10
calls from 150 on; it is wrong when any look says what is not so.  The calls are read as they came,
in the order of the ledger, and sorted by digest anew at each look, as in a trial.  Calls of 20 in
which an error spreads to all that stands below it are compared in the few texts that a trial asks
alone, too.
"""
import collections
import functools
import os
import random
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir))

import batch_harness as bh  # noqa: E402

LOOKS = range(150, 401, 10)             # calls
LONG = 20                               # texts of a long one
MARGIN, MOST = 0.02, 0.05               # as the options have them
WRONG = bh.LEVEL                        # share of runs that may be


def answers_of(dice, noise, excess):
    """One text's answers here, at size 1 and at its repetition: each errs alone, and here once more."""
    here, one, two = [int(dice.random() < noise) for _ in range(3)]
    floor = 2 * noise * (1 - noise)
    if dice.random() < excess / (1 - floor):
        here = 2
    return (here,), (one,), (two,)


def a_call(dice, noise, excess):
    """How much more a call's two answers differ than by the floor, on the average `excess`."""
    texts = [answers_of(dice, noise, excess) for _ in range(2)]
    return bh.excess_of([0, 1], [dict(enumerate(answers)) for answers in zip(*texts)])


def a_long_call(dice, noise, excess):
    """The same of a call of 20: from some place on, now and then, every answer differs."""
    floor = 2 * noise * (1 - noise)
    begin = LONG
    if dice.random() < excess / (1 - floor) * 2 * LONG / (LONG + 1):
        begin = dice.randrange(LONG)
    keys = sorted(dice.getrandbits(128) for _ in range(LONG))       # as a trial orders texts
    alone = {key: answers_of(dice, noise, 0) for key in keys if bh.asked_alone(key, LONG)}
    answers = [{key: three[arm] for key, three in alone.items()} for arm in range(3)]
    answers[0].update((key, (2,)) for key in alone if keys.index(key) >= begin)
    return bh.excess_of(list(alone), answers)


def differences(dice, by_digest, excess, says, call=a_call):
    """Whether any look at the differences of one run says something."""
    noise = dice.choice((0, 0.005, 0.015))
    calls = [(dice.random(), call(dice, noise, excess)) for _ in range(LOOKS[-1])]
    for look in LOOKS:
        seen = calls[:look]
        if by_digest:
            seen.sort(key=lambda call: call[0])
        values = collections.Counter(value for _, value in seen if value is not None)
        if says(values, MARGIN):
            return True
    return False


long_differences = functools.partial(differences, call=a_long_call)


def failures(dice, by_digest, rate, says):
    """Whether any look at the failures of one run says something."""
    calls = [(dice.random(), dice.random() < rate) for _ in range(LOOKS[-1])]
    for look in LOOKS:
        seen = calls[:look]
        if by_digest:
            seen.sort()
        if says(bh.failure_limits(sum(failed for _, failed in seen), look)):
            return True
    return False


# what is looked at, the truth, what would be wrong to say
CASES = (
    ("differences of 2.05 points called safe", differences, MARGIN + 0.0005, bh.shown_below),
    ("differences of 1.95 points called not safe", differences, MARGIN - 0.0005, bh.shown_above),
    ("the same in calls of 20 called safe", long_differences, MARGIN + 0.0005, bh.shown_below),
    ("the same in calls of 20 called not safe", long_differences, MARGIN - 0.0005,
     bh.shown_above),
    ("failures of 5.05 % called safe", failures, MOST + 0.0005, lambda limits: limits.high <= MOST),
    ("failures of 4.95 % called not safe", failures, MOST - 0.0005,
     lambda limits: limits.low > MOST),
)


def clustered(dice, correlation=0.3, block=20):
    """Whether failures of 5 % in clusters are called safe at any look: what the README warns of."""
    odds = 1 / correlation - 1
    failed = 0
    for call in range(LOOKS[-1]):
        if call % block == 0:
            rate = dice.betavariate(MOST * odds, (1 - MOST) * odds)
        failed += dice.random() < rate
        if call + 1 in LOOKS and bh.failure_limits(failed, call + 1).high <= MOST:
            return True
    return False


def main(runs=2000):
    """Print the share of wrong runs of each case, in both orders; 1 where one is above the level."""
    bad = 0
    for words, look, truth, says in CASES:
        shares = []
        for by_digest in (False, True):
            dice = random.Random(words)
            wrong = sum(look(dice, by_digest, truth, says) for _ in range(runs))
            shares.append(wrong / runs)
        bad += max(shares) > WRONG
        print("%-44s ledger order %.1f %%, digest order %.1f %%" % (
            words, 100 * shares[0], 100 * shares[1]))
    dice = random.Random(runs)
    print("%-44s %.0f %%: calls are assumed to fail independently" % (
        "failures in clusters called safe", 100 * sum(clustered(dice) for _ in range(runs)) / runs))
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
