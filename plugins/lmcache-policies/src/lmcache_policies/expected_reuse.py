"""How soon objects of a class come back, learned from the sample.

For each class and each age (in doublings) it estimates the chance of a use at that age, then the best rate of hits that
keeping an object of that class and age can give: hits expected until some later age, divided by the time that the
object takes up until then, for the best such age. An object with the least rate goes first.
"""

from __future__ import annotations

from bisect import bisect_right

from lmcache_policies.pasts import CLASSES, GAP_CLASSES, USES_CLASSES, Past

AGES = 24  # doublings of the age: beyond 2^23 uses all ages are one
BELIEF = 100.0  # observations that an estimate of few is worth, of the classes around it
PERIOD_USES_MIN = 4096  # uses in which every class is estimated anew; a quarter of a large store's objects
FADING_ROUNDS = 16  # of estimates, after which what was observed counts for a tenth less
FADED = 0.9
MOMENTS_MAX = 48  # of a class's arrivals; older ones lie further apart

_SHORTEST = [float(1 << age >> 1) for age in range(AGES + 1)]  # the least age of each class of ages
_ZEROS = [0.0] * AGES


class _Class:
    """Observations of one class: how many came into it, when, and at which ages they were used again."""

    __slots__ = ("arrived", "counts", "moments", "rounds", "used")

    def __init__(self) -> None:
        self.arrived = 0.0
        self.used = [0.0] * AGES
        self.moments: list[int] = []  # when `counts` was the sum of arrivals
        self.counts: list[float] = []
        self.rounds = 0

    def reached(self, now: int) -> list[float]:
        """How many of its objects reached each age, those that were used before not counted. Those that are too young
        count for nothing: else a class that grows would look as if it never came back."""
        found, survivors = [], 1.0
        for age, used in enumerate(self.used):
            at = bisect_right(self.moments, now - _SHORTEST[age]) - 1
            there = self.counts[at] * survivors if at >= 0 else 0.0
            if there < used:
                there = used
            found.append(there)
            if there:
                survivors *= 1.0 - used / there
        return found

    def note(self, now: int) -> None:
        self.moments.append(now)
        self.counts.append(self.arrived)
        if len(self.moments) > MOMENTS_MAX:  # every second one of the older half goes
            half = MOMENTS_MAX // 2
            del self.moments[1:half:2], self.counts[1:half:2]
        self.rounds += 1
        if self.rounds % FADING_ROUNDS == 0:
            self.arrived *= FADED
            self.used = [each * FADED for each in self.used]
            self.counts = [each * FADED for each in self.counts]


class _Pool:
    """Sums over several classes."""

    __slots__ = ("exposed", "used")

    def __init__(self) -> None:
        self.used = [0.0] * AGES
        self.exposed = [0.0] * AGES

    def replace(self, used: list[float], exposed: list[float], used_now: list[float], exposed_now: list[float]) -> None:
        self.used = [a - b + c for a, b, c in zip(self.used, used, used_now, strict=True)]
        self.exposed = [a - b + c for a, b, c in zip(self.exposed, exposed, exposed_now, strict=True)]


class ExpectedReuse:
    """The estimates. `rates[grade][age.bit_length()]`: what keeping it is worth, in hits per time.

    Source: the index of Gittins ("Bandit processes and dynamic allocation indices", 1979) over classes of objects, as
    in Beckmann, Chen and Cidon, "LHD: improving cache hit rate by maximizing hit density", NSDI 2018; the chances by
    Kaplan and Meier, 1958. `use` costs O(1), and one class in turn is estimated anew every few uses.
    """

    def __init__(self) -> None:
        self.rates = [[1e-9 / (1.0 + shortest) for shortest in _SHORTEST] for _ in range(CLASSES)]
        self._classes: dict[int, _Class] = {}
        self._estimated: dict[int, tuple[list[float], list[float]]] = {}
        self._all = _Pool()
        self._by_gap = [_Pool() for _ in range(GAP_CLASSES)]
        self._by_uses = [_Pool() for _ in range(USES_CLASSES)]
        self._turn: list[int] = []
        self.period_uses = PERIOD_USES_MIN
        self._until_next = PERIOD_USES_MIN // 2

    def use(self, left: int, past: Past) -> None:
        """An object was used: it was of class `left`, unless this is the first use that is known."""
        if past.gap:
            age = past.gap.bit_length()
            self._class(left).used[age if age < AGES else AGES - 1] += 1.0
        self._class(past.grade).arrived += 1.0
        self._until_next -= 1
        if self._until_next <= 0:
            self._estimate_next(past.last)

    def _class(self, grade: int) -> _Class:
        known = self._classes.get(grade)
        if known is None:
            known = self._classes[grade] = _Class()
        return known

    def _estimate_next(self, now: int) -> None:
        if not self._turn:
            # Those that nobody of the sample is in come last: all that is known of them is what is known of the others.
            known = self._classes
            self._turn = [grade for grade in range(CLASSES) if grade not in known] + list(known)
        self._estimate(self._turn.pop(), now)
        self._until_next = self.period_uses // CLASSES

    def _estimate(self, grade: int, now: int) -> None:
        used = exposed = _ZEROS
        known = self._classes.get(grade)
        if known is not None:
            known.note(now)
            used, exposed = known.used[:], known.reached(now)
        used_before, exposed_before = self._estimated.get(grade, (_ZEROS, _ZEROS))
        by_gap, by_uses = self._by_gap[grade // USES_CLASSES], self._by_uses[grade % USES_CLASSES]
        if known is not None:
            for pool in (self._all, by_gap, by_uses):
                pool.replace(used_before, exposed_before, used, exposed)
            self._estimated[grade] = used, exposed
        times, hits = [0.0], [0.0]
        survivors = 1.0
        for age in range(AGES):
            general = _ratio(self._all.used[age], self._all.exposed[age])
            alike = _ratio(by_gap.used[age] + BELIEF * general, by_gap.exposed[age] + BELIEF)
            as_often = _ratio(by_uses.used[age] + BELIEF * general, by_uses.exposed[age] + BELIEF)
            prior = min(1.0, alike * as_often / general) if general > 0.0 else 0.0
            chance = min(1.0, (used[age] + BELIEF * prior + 1e-6 / (1.0 + age)) / (exposed[age] + BELIEF))
            coming = survivors * chance
            hits.append(hits[-1] + coming)
            times.append(times[-1] + (_SHORTEST[age + 1] - _SHORTEST[age]) * max(survivors - coming / 2, 1e-9))
            survivors = max(1e-9, survivors - coming)
        self.rates[grade] = _steepest(times, hits)


def _ratio(part: float, whole: float) -> float:
    return part / whole if part > 0.0 and whole > 0.0 else 0.0


def _steepest(times: list[float], hits: list[float]) -> list[float]:
    """For each point but the last the steepest line to any later one: walks the upper hull from the end."""
    rates = [0.0] * len(times)
    hull = [len(times) - 1]
    for at in range(len(times) - 2, -1, -1):

        def slope(start: int, end: int) -> float:
            return (hits[end] - hits[start]) / max(1e-12, times[end] - times[start])

        while len(hull) >= 2 and slope(at, hull[-1]) <= slope(at, hull[-2]):
            hull.pop()
        rates[at] = slope(at, hull[-1]) + 1e-15 / (1.0 + _SHORTEST[at])
        hull.append(at)
    return rates
