"""The table of methods: what each states of its schedules is what its generator makes."""

from itertools import product

import pytest
from legal_devices import options_of, takes
from tiers import tiers

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules import REGISTRY, Method, Option, build, check, find_method, peak_activations, register, simulate
from jaxpipe.schedules.methods.option import at_least

VARIANTS = [
    pytest.param(method, options, id="-".join([name, *(f"{key}={value}" for key, value in options.items())]))
    for name, method in REGISTRY.items()
    for options in options_of(method)
]
IN_TIERS = [
    each if not each.values[1] else pytest.param(*each.values, id=each.id, marks=pytest.mark.ci) for each in VARIANTS
]
AT_EQUAL_TIMES = [each for each in IN_TIERS if "input_gradient" not in each.values[1]]


def sizes(*nums_devices: int):
    for d in nums_devices:
        for n in sorted({1, 2, d - 1, d, d + 1, 2 * d - 1, 2 * d, 2 * d + 1, 3 * d, 4 * d} - {0}):
            yield d, n


@pytest.mark.parametrize("nums_devices", tiers([(2, 3, 4)], slow=[(6,)]), ids=str)
@pytest.mark.parametrize(("method", "options"), AT_EQUAL_TIMES)
def test_closed_forms_are_what_is_simulated(method: Method, options, nums_devices):
    for d, n in sizes(*nums_devices):
        if not method.takes(d, **options):
            continue
        stated, (least, most) = method.bubble_ratio(d, n, **options), method.peak_activations(d, n, **options)
        schedule = check(method.build(num_devices=d, num_microbatches=n, **options))
        if stated is not None:
            assert simulate(schedule).bubble_ratio == pytest.approx(stated, rel=1e-12), (d, n)
        peak = peak_activations(schedule)
        assert least is None or peak.min() == least, (d, n)
        assert most is None or peak.max() == most, (d, n)


@pytest.mark.parametrize("method", REGISTRY.values(), ids=REGISTRY)
def test_every_method_has_closed_forms_a_summary_and_a_paper(method: Method):
    d = max(8, method.least_devices)
    assert method.bubble_ratio(d, 4 * d) is not None
    assert method.peak_activations(d, 4 * d)[1] is not None
    assert method.summary
    assert method.paper


@pytest.mark.parametrize(("method", "options"), IN_TIERS)
def test_stated_kinds_of_actions_and_replicas_are_there(method: Method, options):
    schedules = [
        check(method.build(num_devices=d, num_microbatches=n, **options))
        for d, n in product((1, 4, 5, 6), (1, 9))
        if method.takes(d, **options)
    ]
    assert {schedule.num_replicas for schedule in schedules} == {method.num_replicas}
    assert any(schedule.has_split_backward for schedule in schedules) == method.has_split_backward
    assert any(schedule.parks_pages for schedule in schedules) == method.parks_pages


@pytest.mark.parametrize(("method", "options"), IN_TIERS)
def test_rows_repeat_after_the_period(method: Method, options):
    """A period more of microbatches takes as long each time, as `estimate.extension` assumes, at least nearly."""
    d = max(4, method.least_devices)
    period = method.period_of(d, options)
    if period is None:
        return
    makespans = [
        simulate(method.build(num_devices=d, num_microbatches=k * period, **options)).makespan for k in (4, 5, 8)
    ]
    first, second, last = makespans
    assert last == pytest.approx(second + 3 * (second - first), rel=0.04)


@pytest.mark.parametrize("name", REGISTRY)
def test_where_a_method_exists_its_generator_makes_it_and_elsewhere_it_is_refused(name):
    for d in range(1, 10):
        if takes(name, d):
            assert build(name, num_devices=d, num_microbatches=2).num_devices == d
        else:
            with pytest.raises(ScheduleError, match=f"num_devices={d} .*\n  rule .*\n  repair: set num_devices="):
                build(name, num_devices=d, num_microbatches=2)


def some_method(**more) -> Method:
    def generator(*, num_devices, num_microbatches, ahead=1):
        return build("1f1b", num_devices=num_devices, num_microbatches=num_microbatches)

    given = {"name": "mine", "generator": generator, "summary": "-", "options": (Option("ahead", at_least(1)),)}
    return Method(**{**given, **more})


def test_options_are_the_generators_keywords():
    with pytest.raises(ScheduleError, match=r"(?s)rule method-options.*options: none.*keywords: ahead"):
        some_method(options=())


def test_a_name_is_one_methods_alone(monkeypatch):
    monkeypatch.setattr("jaxpipe.schedules.methods.registry.REGISTRY", dict(REGISTRY))
    mine = register(some_method())
    assert register(mine) is mine is find_method("mine")
    with pytest.raises(ScheduleError, match="there is a method 'mine' already"):
        register(some_method())


def test_devices_that_a_method_is_not_for_are_refused():
    with pytest.raises(ScheduleError, match=r"(?s)num_devices=2 .*rule least-devices.*set num_devices=3 or more"):
        some_method(least_devices=3).build(num_devices=2, num_microbatches=1)
    with pytest.raises(ScheduleError, match="rule even-devices"):
        some_method(even_devices=True).build(num_devices=3, num_microbatches=1)
