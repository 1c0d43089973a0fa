//! Figures and their goals, as both benchmarks print them.
#![allow(dead_code, reason = "each benchmark uses another part of it")]
#![allow(unreachable_pub, reason = "a module of a program has no outside")]

use std::fmt;
use std::hint::black_box;
use std::time::{Duration, Instant};

/// Whether a figure meets its goal.
#[derive(Clone, Copy, Debug)]
pub struct Goal(&'static str);

impl Goal {
    /// No goal: the figure stands beside another one.
    pub fn none() -> Self {
        Self("")
    }

    /// The goal.
    pub fn is(met: bool) -> Self {
        Self(if met { "met" } else { "MISSED" })
    }

    /// At most so much.
    pub fn at_most(value: Duration, limit: Duration) -> Self {
        Self::is(value <= limit)
    }

    /// At most so many.
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

/// The load average of the last minute, five and fifteen minutes.
pub fn load() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').take(3).collect::<Vec<_>>().join(" ")
}

/// Prints one figure, with the load of the machine at that moment.
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

/// The memory of this process that is in use, in KiB.
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

/// How long something took, many times.
#[derive(Clone, Debug, Default)]
pub struct Times(Vec<Duration>);

impl Times {
    /// Does something and takes its time.
    pub fn time<T>(&mut self, work: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let result = black_box(work());
        self.0.push(start.elapsed());
        result
    }

    /// Adds a time that was taken elsewhere.
    pub fn push(&mut self, time: Duration) {
        self.0.push(time);
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// All of them together.
    pub fn sum(&self) -> Duration {
        self.0.iter().sum()
    }

    /// The time that half of them did not exceed.
    pub fn median(&self) -> Duration {
        self.quantile(50)
    }

    /// The time that so many in a hundred did not exceed (nearest rank).
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
