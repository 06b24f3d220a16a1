"""The cost model: what it adds, what it takes the larger of, and that it reads the machine alone."""

from dataclasses import replace

import pytest

from tvmflow.compiler import cost, tiles
from tvmflow.compiler.machine import Machine, of_profile
from tvmflow.hardware.profiles import named, shipped

_AVX512 = ("avx", "avx512bw", "avx512f")


def _machine(name: str, cores: int = 2) -> Machine:
    return of_profile(named(name), _AVX512, cores)


def test_results_in_flight_hide_the_latency_of_a_multiply_add() -> None:
    machine = _machine("sapphire-rapids")
    enough = cost.in_flight(machine)
    assert enough == machine.vectors.latency * machine.vectors.multiply_adds
    many, few = (cost.results(1, 10_000, count, machine) for count in (enough, enough / 2))
    assert few == pytest.approx(2 * many, rel=0.01)
    assert cost.results(1, 10_000, 4 * enough, machine) == pytest.approx(many, rel=0.01)


def test_lines_at_a_distance_share_the_sets_of_the_first_cache() -> None:
    machine = _machine("zen4")
    span, line = machine.first.span, machine.first.line
    # At a multiple of the span all lines share one set; at half of it, two sets; next to each other, none.
    assert [cost.lines_in_set(36, distance, machine.first) for distance in (0, span, 3 * span)] == [36] * 3
    assert [cost.lines_in_set(36, distance, machine.first) for distance in (span // 2, span // 4 * 3)] == [18, 9]
    assert cost.lines_in_set(36, span + line, machine.first) == 1


def test_half_the_multiply_adds_take_twice_the_cycles() -> None:
    zen4, zen5 = (cost.step(14, 2, _machine(name)) for name in ("zen4", "zen5"))
    assert zen4 == 2 * zen5


def test_data_comes_from_the_first_level_that_holds_it_and_cores_share_it() -> None:
    machine = _machine("zen4", 8)
    sizes = [machine.first.size // 2, machine.second.size // 2, machine.last.size // 16, machine.last.size]
    levels = [cost.level_of(size, machine) for size in sizes]
    assert levels == [machine.first, machine.second, machine.third, machine.memory]
    cycles = [cost.move_cycles(1e6, 1e6, size, machine) for size in sizes]
    assert cycles == sorted(cycles)
    assert cost.move_cycles(1e6, 1e6, sizes[-1], _machine("zen4", 64)) > cycles[-1]


@pytest.mark.parametrize("name", sorted(shipped()))
def test_a_cache_is_as_fast_where_other_cores_have_caches_of_their_own(name: str) -> None:
    profile = named(name)
    for cache in (profile.first, profile.second, profile.last):
        for rate in (cache.read_rate, cache.write_rate):
            assert rate(1) >= rate(cache.cores) == rate(100 * cache.cores)


def test_tasks_hide_a_fetch_of_their_time_and_more_of_them_where_weights_come_from_the_second_cache() -> None:
    machine = _machine("zen4")
    small, rate = machine.first.size // 2, machine.memory.read_rate(machine.cores)
    fetch = small / rate
    assert [cost.tasks_to_fetch(small, fetch / count, machine) for count in (1, 3)] == [2, 6]
    large = 4 * small
    reading = large / machine.second.read_rate(machine.cores)
    assert cost.tasks_to_fetch(large, reading + 4 * fetch, machine) == 2
    assert cost.tasks_to_fetch(large, reading, machine) == float("inf")


def test_bytes_of_an_own_cache_hide_behind_arithmetic_and_those_of_a_shared_one_do_not() -> None:
    machine = _machine("sapphire-rapids")
    own, shared = machine.second.size // 2, machine.second.size * 4
    assert cost.compute_and_move_cycles(1e9, 1e6, 1e6, own, machine) == 1e9
    moving = cost.move_cycles(1e6, 1e6, shared, machine)
    assert cost.compute_and_move_cycles(1e9, 1e6, 1e6, shared, machine) == 1e9 + moving


def test_weights_are_read_again_where_the_cache_of_a_core_does_not_hold_them() -> None:
    machine = _machine("zen4")
    assert cost.weight_read_cycles(machine.second.size, machine) == 0
    # Where the weights of the whole model come from memory, those of a small function do so too.
    assert cost.weight_read_cycles(1024, replace(machine, cold=True)) == 1024 / machine.memory.read_rate(machine.cores)
    size = machine.second.size + 1
    warm, cold = (cost.weight_read_cycles(size, replace(machine, cold=cold)) for cold in (False, True))
    assert 0 < warm < cold


@pytest.mark.parametrize("name", sorted(shipped()))
def test_tiles_fit_the_registers_and_the_sets_of_the_first_cache(name: str) -> None:
    machine = of_profile(named(name), _AVX512, 4)
    conflicting = machine.first.span
    for rows in (1, 7, 49, 196, None):
        for vectors in (1, 2, 4, 6, 32):
            for row_bytes in (None, 4, conflicting, 3 * conflicting):
                tile = tiles.choose(rows, vectors, machine, row_bytes)
                assert rows is None or tile.rows <= rows
                assert tile.rows * tile.vectors + tile.vectors + 1 <= machine.registers
                assert row_bytes in (None, 4) or tile.rows <= max(1, cost.rows_in_set(machine))


@pytest.mark.parametrize("name", sorted(shipped()))
def test_a_tile_of_an_unknown_number_of_rows_keeps_a_core_busy(name: str) -> None:
    for features in ((), ("avx",), _AVX512):
        machine = of_profile(named(name), features, 2)
        for vectors in range(1, 9):
            tile = tiles.choose(None, vectors, machine)
            assert vectors % 2 or tile.rows == min(tiles.UNKNOWN_ROWS, (machine.registers - 3) // 2)
            # Of more rows, most would be wasted where there are few.
            assert tile.rows * tile.vectors >= min(tiles.UNKNOWN_ROWS, cost.in_flight(machine)), vectors


@pytest.mark.few(4)
@pytest.mark.parametrize("name", sorted(shipped()))
def test_vectors_that_only_poor_tiles_divide_are_filled_up(name: str) -> None:
    machine = of_profile(named(name), _AVX512, 2)
    for rows in (1, 7, 49, 169, None):
        for vectors in range(1, 130):
            assert tiles.filled(rows, vectors, machine) - vectors in (0, 1)
            # Tiles of two and three vectors keep every processor busy.
            assert vectors % 6 or tiles.filled(rows, vectors, machine) == vectors


def test_1000_channels_of_eight_lanes_are_filled_up_to_1008() -> None:
    machine = of_profile(named("zen3"), ("avx",), 2)
    assert machine.lanes == 8
    assert tiles.filled(169, 125, machine) == 126
    assert tiles.choose(169, 126, machine).vectors > 1


def test_whole_vectors_are_copied_for_one_more_where_many_rows_share_the_copy() -> None:
    machine = of_profile(named("zen3"), ("avx",), 2)
    assert tiles.filled(144, 25, machine, is_packed=False) == 26
    assert tiles.filled(8, 25, machine) == 26
    for rows in (1, 2, 8, None):
        assert tiles.filled(rows, 25, machine, is_packed=False) == 25


def test_pixels_beyond_a_line_are_copied_once_for_all_taps() -> None:
    machine = of_profile(named("zen3"), ("avx",), 2)
    # Lines of 14 pixels, groups of 16 channels: three tiles of five pixels by two vectors waste one pixel.
    assert tiles.choose(14, 2, machine, uses=9) == tiles.Tile(5, 2)
    assert tiles.choose(14, 2, machine) == tiles.Tile(7, 1)


@pytest.mark.parametrize("name", sorted(shipped()))
def test_a_tile_reads_its_weights_at_less_than_the_rate_of_the_second_level_cache(name: str) -> None:
    machine = of_profile(named(name), _AVX512, 2)
    for rows in (49, 196, 784):
        for vectors in (2, 3, 5, 7, 12):
            tile = tiles.choose(rows, vectors, machine)
            weights = tile.vectors * machine.lanes * machine.number
            assert weights < 0.8 * machine.second.read * cost.step(tile.rows, tile.vectors, machine)


@pytest.mark.parametrize("name", sorted(shipped()))
def test_sums_side_by_side_keep_a_core_busy_within_its_registers(name: str) -> None:
    machine = of_profile(named(name), _AVX512, 2)
    assert 1 < tiles.most_pixels(machine) <= machine.registers // 2
    for count in range(1, 65):
        size = cost.side_by_side(count, machine)
        assert count % size == 0
        assert size <= machine.registers // 2
        smaller = [other for other in range(1, size) if count % other == 0]
        assert all(other < cost.in_flight(machine) for other in smaller)
