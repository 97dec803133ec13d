"""Clock, temperature and power of an NVIDIA device, by the driver's own library (NVML) through ctypes.

Memory is never asked here: on an integrated device NVML does not know it. What a driver does not say is None, not 0.
"""

import ctypes
from dataclasses import asdict, dataclass

LIBRARY = "libnvidia-ml.so.1"
SM_CLOCK, GPU_TEMPERATURE = 1, 0
SUCCESS = 0
THROTTLE_BITS = {
    0x4: "power cap", 0x8: "hardware slowdown", 0x20: "software thermal slowdown", 0x40: "hardware thermal slowdown",
    0x80: "power brake",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceState:
    """The device at one moment; keys of metrics.jsonl."""

    sm_clock_mhz: int | None = None
    temp_c: int | None = None
    power_w: float | None = None


class DeviceMeter:
    """Reads the state of one device, about 20 us a look; every field is None where there is no driver.

    Args:
        index: The device's number as the driver counts, or its UUID where CUDA shows a part of the devices.
        library: A loaded NVML; the driver's where None.
    """

    def __init__(self, index: int = 0, uuid: str | None = None, library: ctypes.CDLL | None = None) -> None:
        self._library, self._handle = library or _load(), ctypes.c_void_p()
        if self._library is None or self._library.nvmlInit_v2() != SUCCESS:
            self._library = None
            return
        found = 1
        if uuid is not None:
            name = (uuid if uuid.startswith("GPU-") else f"GPU-{uuid}").encode()
            found = self._library.nvmlDeviceGetHandleByUUID(name, ctypes.byref(self._handle))
        if found != SUCCESS:
            found = self._library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(self._handle))
        if found != SUCCESS:
            self._library = None

    def state(self) -> DeviceState:
        """Now."""
        milliwatts = self._number("nvmlDeviceGetPowerUsage")
        return DeviceState(
            sm_clock_mhz=self._number("nvmlDeviceGetClockInfo", SM_CLOCK),
            temp_c=self._number("nvmlDeviceGetTemperature", GPU_TEMPERATURE),
            power_w=None if milliwatts is None else milliwatts / 1000,
        )

    def metrics(self) -> dict[str, int | float | None]:
        """The state by its keys in metrics.jsonl."""
        return asdict(self.state())

    def throttle_reasons(self) -> list[str] | None:
        """Why the clock is held down now; None where the driver does not say."""
        if self._library is None:
            return None
        reasons = ctypes.c_ulonglong()
        if self._library.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle, ctypes.byref(reasons)) != SUCCESS:
            return None
        return [name for bit, name in THROTTLE_BITS.items() if reasons.value & bit]

    def _number(self, function: str, *arguments: int) -> int | None:
        if self._library is None:
            return None
        value = ctypes.c_uint()
        status = getattr(self._library, function)(self._handle, *arguments, ctypes.byref(value))
        return int(value.value) if status == SUCCESS else None


def _load() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError:
        return None  # no NVIDIA driver
