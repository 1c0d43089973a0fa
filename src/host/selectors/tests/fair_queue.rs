//! Turns of expressions.

use super::super::*;

#[tokio::test]
async fn a_selector_with_many_requests_takes_one_turn() {
    let turns = Arc::new(FairQueue::default());
    let log: Arc<Mutex<Vec<&str>>> = Arc::default();
    let work = |name: &'static str, times: usize| {
        let (turns, log) = (Arc::clone(&turns), Arc::clone(&log));
        tokio::spawn(async move {
            let _line = turns.line(&"".into(), &name.into()).await;
            for _ in 0..times {
                let _turn = turns.turn(&"".into()).await;
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
}

#[tokio::test]
async fn a_namespace_with_many_expressions_gets_every_second_turn() {
    let turns = Arc::new(FairQueue::default());
    let log: Arc<Mutex<Vec<&str>>> = Arc::default();
    let work = |namespace: &'static str, expression: usize| {
        let (turns, log) = (Arc::clone(&turns), Arc::clone(&log));
        tokio::spawn(async move {
            let namespace: Arc<str> = namespace.into();
            let _line = turns.line(&namespace, &expression.to_string().into()).await;
            for _ in 0..5 {
                let _turn = turns.turn(&namespace).await;
                log.lock()
                    .unwrap()
                    .push(if expression == 0 { "one" } else { "many" });
                tokio::task::yield_now().await;
            }
        })
    };
    let many: Vec<_> = (1..=20).map(|expression| work("many", expression)).collect();
    while log.lock().unwrap().is_empty() {
        tokio::task::yield_now().await;
    }
    let asked = log.lock().unwrap().len();
    work("one", 0).await.unwrap();
    let waited = log.lock().unwrap().len() - asked;
    assert!(waited <= 12, "{waited} turns for five");
    for many in many {
        many.await.unwrap();
    }
    assert_eq!(log.lock().unwrap().len(), 105);
}

#[tokio::test]
async fn a_cancelled_caller_does_not_block_its_line() {
    let turns = FairQueue::default();
    let (namespace, expression) = ("n".into(), "x".into());
    {
        let _line = turns.line(&namespace, &expression).await;
        let _turn = turns.turn(&namespace).await;
        let waiting = turns.line(&namespace, &expression);
        tokio::select! {
            biased;
            _ = waiting => panic!("two in one line"),
            () = tokio::task::yield_now() => {}
        }
    }
    let _line = turns.line(&namespace, &expression).await;
    drop(turns.turn(&namespace).await);
}
