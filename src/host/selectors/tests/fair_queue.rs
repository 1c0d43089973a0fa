//! Turns of expressions.

use super::super::*;

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
