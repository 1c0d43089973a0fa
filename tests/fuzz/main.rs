//! Fuzz tests of every parser of external input.
//!
//! A target takes bytes, must not panic, and checks properties of the result, such as round trips. The inputs are the files of
//! `corpus/<target>` and mutations of them. `make test` replays the corpus with a fixed set of mutations; `make fuzz` tries random
//! mutations for a minute per target (`FUZZ_SECONDS`, `FUZZ_SEED`). A failing input is added to the corpus and replayed from then on.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may fail")]

mod mutation;
mod targets;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use mutation::Mutator;

/// Mutations per target in a test run.
const DEFAULT_MUTATIONS: usize = 3_000;

type Target = fn(&[u8]);

fn corpus(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fuzz/corpus")
        .join(name)
}

fn fuzz(directory: &Path, target: Target) {
    let name = directory.file_name().unwrap().to_string_lossy();
    let mut files: Vec<PathBuf> = std::fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    files.sort();
    assert!(!files.is_empty(), "{name} has a corpus");
    let seeds: Vec<Vec<u8>> = files.iter().map(|file| std::fs::read(file).unwrap()).collect();
    for (file, seed) in files.iter().zip(&seeds) {
        let outcome = catch_unwind(AssertUnwindSafe(|| target(seed)));
        assert!(outcome.is_ok(), "{} fails", file.display());
    }
    let seconds = std::env::var("FUZZ_SECONDS")
        .ok()
        .map(|text| text.parse().unwrap());
    let (until, most, seed) = match seconds {
        Some(seconds) => {
            let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
            let now = u64::try_from(now.as_nanos() & u128::from(u64::MAX)).unwrap();
            let seed = std::env::var("FUZZ_SEED").map_or(now, |text| text.parse().unwrap());
            // Printed first: if an input ends the process, it is not stored, but the seed reproduces it.
            println!("{name}: FUZZ_SEED={seed}");
            (Instant::now() + Duration::from_secs(seconds), usize::MAX, seed)
        }
        // Not limited by time, so that slow machines run the same inputs.
        None => (Instant::now() + Duration::from_secs(600), DEFAULT_MUTATIONS, 1),
    };
    let mut mutator = Mutator::new(seeds, seed);
    let mut tried = 0;
    while tried < most && Instant::now() < until {
        let input = mutator.next();
        if catch_unwind(AssertUnwindSafe(|| target(&input))).is_err() {
            let path = directory.join(format!("failed-{:08x}", crc32fast::hash(&input)));
            std::fs::write(&path, &input).unwrap();
            panic!(
                "{name} fails after {tried} inputs of seed {seed}: {}",
                path.display()
            );
        }
        tried += 1;
    }
    println!("{name}: {tried} inputs from {} files, seed {seed}", files.len());
}

macro_rules! targets {
    ($($name:ident),* $(,)?) => {
        $(
            #[test]
            fn $name() {
                fuzz(&corpus(stringify!($name)), targets::$name);
            }
        )*

        #[test]
        fn every_folder_of_the_corpus_has_a_target() {
            let mut folders: Vec<String> = std::fs::read_dir(corpus(""))
                .unwrap()
                .map(|entry| entry.unwrap().file_name().into_string().unwrap())
                .collect();
            folders.sort();
            let mut names = vec![$(stringify!($name)),*];
            names.sort_unstable();
            assert_eq!(folders, names);
        }
    };
}

targets!(
    authority,
    cdi,
    checkpoint,
    config,
    device_manager,
    handle,
    kubelet_state,
    mounts,
    prepare,
    requests,
    selector,
    sysfs,
    uevent
);

#[test]
fn an_input_that_fails_is_found_and_kept() {
    // A parser with a fault that only a mutation triggers.
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("seed"), "a good input").unwrap();
    let fails: Target = |bytes| assert!(!bytes.contains(&0xff), "no such byte is in the corpus");
    let outcome = catch_unwind(|| fuzz(directory.path(), fails));
    let message = outcome.unwrap_err();
    assert!(message.downcast_ref::<String>().unwrap().contains("failed-"));
    let kept = std::fs::read_dir(directory.path()).unwrap().filter(|entry| {
        std::fs::read(entry.as_ref().unwrap().path())
            .unwrap()
            .contains(&0xff)
    });
    assert_eq!(kept.count(), 1);
}
