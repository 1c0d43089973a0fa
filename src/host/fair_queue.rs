//! Fair queue for evaluations: expressions take turns, so an expensive expression delays another one by at most one turn.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tokio::sync::{Mutex as AsyncMutex, MutexGuard, OwnedMutexGuard};

/// The fair queue of all expressions.
#[derive(Debug, Default)]
pub(crate) struct FairQueue {
    /// Held for one turn. Waiters get it in the order of their requests, and request it retry_at for their next turn.
    turn: AsyncMutex<()>,
    /// Per expression, the lock for which its waiters queue; its holder alone requests turns, so a hundred claims with one expression
    /// count as one.
    lines: Mutex<BTreeMap<Arc<str>, Weak<AsyncMutex<()>>>>,
}

impl FairQueue {
    /// Waits for the right to request turns for an expression.
    pub(crate) async fn line(&self, expression: &Arc<str>) -> OwnedMutexGuard<()> {
        let line = {
            let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
            lines.retain(|_, line| line.strong_count() > 0);
            let line = lines.get(expression).and_then(Weak::upgrade).unwrap_or_default();
            lines.insert(Arc::clone(expression), Arc::downgrade(&line));
            line
        };
        line.lock_owned().await
    }

    /// Waits for a turn.
    pub(crate) async fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_selector_with_many_requests_takes_one_turn() {
        let turns = Arc::new(FairQueue::default());
        let log: Arc<Mutex<Vec<&str>>> = Arc::default();
        let work = |name: &'static str, times: usize| {
            let (turns, log) = (Arc::clone(&turns), Arc::clone(&log));
            tokio::spawn(async move {
                let _line = turns.line(&name.into()).await;
                for _ in 0..times {
                    let _turn = turns.turn().await;
                    log.lock().unwrap().push(name);
                    tokio::task::yield_now().await;
                }
            })
        };
        let dear: Vec<_> = (0..20).map(|_| work("dear", 5)).collect();
        while log.lock().unwrap().is_empty() {
            tokio::task::yield_now().await;
        }
        let asked = log.lock().unwrap().len();
        work("cheap", 2).await.unwrap();
        for dear in dear {
            dear.await.unwrap();
        }
        let log = log.lock().unwrap();
        let cheap: Vec<usize> = (0..log.len()).filter(|&place| log[place] == "cheap").collect();
        assert_eq!((cheap.len(), log.len()), (2, 102));
        let [first, second] = cheap[..] else {
            panic!("{log:?}")
        };
        assert!(first <= asked + 2 && second <= first + 2, "{asked}: {log:?}");
        let lines = turns.lines.lock().unwrap();
        assert!(
            lines.values().all(|line| line.strong_count() == 0),
            "nothing is kept"
        );
    }

    #[tokio::test]
    async fn who_gives_up_in_the_middle_leaves_the_line_to_the_next() {
        let turns = FairQueue::default();
        let expression = "x".into();
        {
            let _line = turns.line(&expression).await;
            let _turn = turns.turn().await;
            let waiting = turns.line(&expression);
            tokio::select! {
                biased;
                _ = waiting => panic!("two in one line"),
                () = tokio::task::yield_now() => {}
            }
        }
        let _line = turns.line(&expression).await;
        drop(turns.turn().await);
    }
}
