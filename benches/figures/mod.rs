//! Figures and their goals, as printed by the benchmarks.
#![allow(dead_code, reason = "each benchmark uses a part of it")]
#![allow(unreachable_pub, reason = "a module of a program has no outside")]

use std::fmt;
use std::hint::black_box;
use std::time::{Duration, Instant};

/// Whether a figure meets its goal.
#[derive(Clone, Copy, Debug)]
pub struct Goal(&'static str);

impl Goal {
    /// No goal: the figure is for comparison.
    pub fn none() -> Self {
        Self("")
    }

    pub fn is(met: bool) -> Self {
        Self(if met { "met" } else { "MISSED" })
    }

    /// The duration must not exceed `limit`.
    pub fn at_most(value: Duration, limit: Duration) -> Self {
        Self::is(value <= limit)
    }

    /// The value must be below `limit`.
    pub fn below(value: u64, limit: u64) -> Self {
        Self::is(value <= limit)
    }
}

/// Prints the measured subject before its figures.
pub fn heading(what: &str) {
    let processors = std::thread::available_parallelism().map_or(0, usize::from);
    let build = if cfg!(debug_assertions) {
        "debug"
    } else {
        "release"
    };
    println!(
        "# {what}: {build} build, {processors} processors, load average {}",
        load()
    );
}

/// Load averages of the last minute, five and fifteen minutes.
pub fn load() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').take(3).collect::<Vec<_>>().join(" ")
}

/// Prints one figure with the current load average.
pub fn figure(name: &str, value: &str, goal: Goal) {
    println!("{name}: {value} [{}load {}]", goal.prefix(), load());
}

impl Goal {
    fn prefix(self) -> String {
        if self.0.is_empty() {
            String::new()
        } else {
            format!("{}, ", self.0)
        }
    }
}

/// Resident memory of this process in KiB.
pub fn resident_kib() -> u64 {
    resident_kib_of("self", "VmRSS:")
}

/// A line of `/proc/PID/status`, in KiB.
pub fn resident_kib_of(process: &str, line: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let found = status.lines().find_map(|text| text.strip_prefix(line));
    found
        .and_then(|text| text.split_whitespace().next()?.parse().ok())
        .unwrap_or_default()
}

/// Repeated measurements of a duration.
#[derive(Clone, Debug, Default)]
pub struct Times(Vec<Duration>);

impl Times {
    /// Measures the duration of `work`.
    pub fn time<T>(&mut self, work: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let result = black_box(work());
        self.0.push(start.elapsed());
        result
    }

    /// Adds a measured duration.
    pub fn push(&mut self, time: Duration) {
        self.0.push(time);
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn sum(&self) -> Duration {
        self.0.iter().sum()
    }

    pub fn mean(&self) -> Duration {
        let count = u32::try_from(self.len()).unwrap_or(u32::MAX);
        self.sum() / count.max(1)
    }

    pub fn median(&self) -> Duration {
        self.quantile(50)
    }

    /// A percentile (nearest rank).
    pub fn quantile(&self, percent: usize) -> Duration {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        let rank = (sorted.len() * percent).div_ceil(100).max(1);
        sorted.get(rank - 1).copied().unwrap_or_default()
    }
}

impl fmt::Display for Times {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (median, high) = (self.median(), self.quantile(99));
        write!(f, "p50 {median:.1?}, p99 {high:.1?}, n={}", self.len())
    }
}

impl FromIterator<Duration> for Times {
    fn from_iter<T: IntoIterator<Item = Duration>>(times: T) -> Self {
        Self(times.into_iter().collect())
    }
}
