"""Clock, temperature and power through a driver library that is a stand-in."""

import ctypes
from typing import Any

from sparkgrpo.profiling import device_state
from sparkgrpo.profiling.device_state import DeviceMeter


class Driver:
    """NVML that knows some figures: a missing one answers "not supported" (3)."""

    def __init__(self, **figures: int) -> None:
        self.figures = figures

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:
        return 0

    def __getattr__(self, function: str) -> Any:
        def call(*arguments: Any) -> int:
            if function not in self.figures:
                return 3
            arguments[-1]._obj.value = self.figures[function]
            return 0

        return call


def test_what_the_driver_says() -> None:
    driver = Driver(
        nvmlDeviceGetClockInfo=2400, nvmlDeviceGetTemperature=61, nvmlDeviceGetPowerUsage=44_500,
        nvmlDeviceGetCurrentClocksThrottleReasons=0x44,
    )  # fmt: skip
    meter = DeviceMeter(library=driver)  # pyright: ignore[reportArgumentType]
    assert meter.metrics() == {"sm_clock_mhz": 2400, "temp_c": 61, "power_w": 44.5}
    assert meter.throttle_reasons() == ["power cap", "hardware thermal slowdown"]


def test_what_it_does_not_say_is_none_and_not_zero() -> None:
    meter = DeviceMeter(library=Driver(nvmlDeviceGetTemperature=50))  # pyright: ignore[reportArgumentType]
    assert meter.metrics() == {"sm_clock_mhz": None, "temp_c": 50, "power_w": None}
    assert meter.throttle_reasons() is None


def test_without_a_driver(monkeypatch: Any) -> None:
    def missing(name: str) -> ctypes.CDLL:
        raise OSError(name)

    monkeypatch.setattr(device_state.ctypes, "CDLL", missing)
    assert set(DeviceMeter().metrics().values()) == {None}
