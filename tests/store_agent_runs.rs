//! Agent runs: every transition, every guard, and the faults of the ancestor (nr-vault.md O1, O2, O11 to O15).

#![allow(clippy::unwrap_used, clippy::missing_panics_doc, clippy::print_stdout, missing_docs)]

#[path = "support/memory_keys.rs"]
mod memory_keys;
#[path = "support/store.rs"]
mod support;

use std::path::Path;

use hardwrap::codec;
use hardwrap::column::{Column, Register, nr_llm};
use hardwrap::store::{
    AgentRuns, Answer, Error, InvalidRun, Lease, NewRun, Outcome, Purged, Retention, Run, RunId, SealedInPlace,
    Settled, Status, Taken, Totals, Waiting, Worker,
};
use support::Shop;

const NOW: i64 = 1_750_000_000;
const REQUEST: &str = "{\"b\": 1, \"a\": [0.50, \"\\u00e9\"],\"b\":2}  ";
const STATE: &str = "{\"messages\":[],\"iterations\":1}";

fn worker(name: &str) -> Worker {
    name.parse().unwrap()
}

fn lease(name: &str) -> Lease {
    Lease { worker: worker(name), expires: NOW + 900 }
}

fn new(id: &str) -> NewRun {
    NewRun { id: Some(id.parse().unwrap()), configuration_identifier: "demo".into(), be_user: 3, ..NewRun::default() }
}

fn id(text: &str) -> RunId {
    text.parse().unwrap()
}

fn outcome(settled: Settled) -> Outcome {
    let totals = Totals {
        iterations: 4,
        truncated: true,
        prompt_tokens: 100,
        completion_tokens: 20,
        tokens: 120,
        cost_micros: 12_345,
    };
    Outcome { settled, error_class: "é".repeat(300), termination_reason: "done".into(), totals }
}

/// A run in each state, named after it; running ones belong to `me`.
fn everywhere(shop: &Shop) -> AgentRuns {
    let runs = shop.runs();
    for status in Status::ALL {
        let name = id(status.name());
        runs.enqueue(&new(status.name()), REQUEST, NOW).unwrap();
        if status == Status::Queued {
            continue;
        }
        assert_eq!(runs.claim(&name, &lease("me"), NOW).unwrap(), Answer::Moved);
        let answer = match status {
            Status::WaitingForApproval => runs.suspend_for_approval(&name, &worker("me"), STATE, NOW),
            Status::WaitingForInput => runs.suspend_for_input(&name, &worker("me"), STATE, NOW),
            Status::Completed => runs.finish(&name, Some(&worker("me")), &outcome(Settled::Completed), NOW),
            Status::Failed => runs.finish(&name, Some(&worker("me")), &outcome(Settled::Failed), NOW),
            Status::Cancelled => runs.cancel(&name, "user", NOW),
            _ => Ok(Answer::Moved),
        };
        assert_eq!(answer.unwrap(), Answer::Moved);
        assert_eq!(runs.status(&name).unwrap(), Some(status));
    }
    runs
}

/// Tries a transition from every state: it moves from those given, and elsewhere says where the run stands and leaves
/// it exactly as it is.
fn moves_only_from(from: &[Status], to: Option<Status>, step: impl Fn(&AgentRuns, &RunId) -> Result<Answer, Error>) {
    let shop = Shop::new();
    let runs = everywhere(&shop);
    for status in Status::ALL {
        let before = shop.whole(status.name()).unwrap();
        let answer = step(&runs, &id(status.name())).unwrap();
        if from.contains(&status) {
            assert_eq!(answer, Answer::Moved, "{status:?}");
            assert_eq!(runs.status(&id(status.name())).unwrap(), Some(to.unwrap_or(status)));
        } else {
            assert_eq!(answer, Answer::InState(status));
            assert_eq!(shop.whole(status.name()).unwrap(), before);
        }
    }
    assert_eq!(step(&runs, &id("nobody")).unwrap(), Answer::NoSuchRun);
}

/// Tries a transition as another worker: refused, and the run is exactly as it was.
fn only_for_its_worker(step: impl Fn(&AgentRuns, &RunId, &Worker) -> Result<Answer, Error>) {
    let shop = Shop::new();
    let runs = everywhere(&shop);
    let before = shop.whole("running").unwrap();
    for other in ["you", "ME", "me "] {
        assert_eq!(step(&runs, &id("running"), &worker(other)).unwrap(), Answer::NotYours, "{other}");
        assert_eq!(shop.whole("running").unwrap(), before);
    }
    assert_eq!(step(&runs, &id("running"), &worker("me")).unwrap(), Answer::Moved);
}

fn opened(plaintext: Result<Option<hardwrap::secret::Plaintext>, Error>) -> Option<String> {
    plaintext.unwrap().map(|plaintext| String::from_utf8(plaintext.expose().to_vec()).unwrap())
}

fn sealed(shop: &Shop, run: &str, column: &str) -> bool {
    shop.cell(run, column).is_some_and(|text| text.starts_with("hw1:"))
}

#[test]
fn an_enqueued_request_is_sealed_and_comes_back_byte_for_byte() {
    let shop = Shop::new();
    let runs = shop.runs();
    let name = runs.enqueue(&NewRun::default(), REQUEST, NOW).unwrap();
    assert_eq!(name.as_str().len(), 36);
    assert!(sealed(&shop, name.as_str(), "queued_request"));
    let run = runs.find(&name).unwrap().unwrap();
    assert_eq!(opened(run.queued_request(&runs)).as_deref(), Some(REQUEST));
    assert_eq!(opened(run.suspended_state(&runs)), None);
    assert_eq!((run.status, run.crdate, run.started_at), (Some(Status::Queued), NOW, 0));
}

#[test]
fn a_started_run_is_running_under_its_lease() {
    let shop = Shop::new();
    let runs = shop.runs();
    let name = runs.start(&new("now"), &lease("me"), NOW).unwrap();
    let run = runs.find(&name).unwrap().unwrap();
    assert_eq!((run.status, run.claimed_by.as_str(), run.lease_expires), (Some(Status::Running), "me", NOW + 900));
    assert_eq!((run.started_at, run.configuration_identifier.as_str(), run.be_user), (NOW, "demo", 3));
}

#[test]
fn a_run_is_made_once() {
    let shop = Shop::new();
    let runs = shop.runs();
    runs.enqueue(&new("once"), REQUEST, NOW).unwrap();
    assert!(matches!(runs.enqueue(&new("once"), REQUEST, NOW), Err(Error::RunExists(uuid)) if uuid == "once"));
    assert!(matches!(runs.start(&new("once"), &lease("me"), NOW), Err(Error::RunExists(_))));
}

#[test]
fn what_is_not_json_is_refused_before_anything_is_sealed_and_never_quoted() {
    let shop = Shop::new();
    let runs = shop.runs();
    shop.keys.set_unavailable(true); // sealing would fail differently
    for text in ["", "hunter2", "{\"a\":1} hunter2", "{'a':1}", "[1,]", "\"hunter2", "NaN", "{\"a\":01}"] {
        let error = runs.enqueue(&NewRun::default(), text, NOW).unwrap_err();
        assert!(matches!(error, Error::NotJson { .. }), "{text}: {error}");
        assert!(!format!("{error:?} {error}").contains("hunter2"));
    }
    assert_eq!(shop.number("SELECT COUNT(*) FROM tx_nrllm_agentrun"), 0);
    shop.keys.set_unavailable(false);
    let deep = format!("{}{}", "[".repeat(5000), "]".repeat(5000));
    for text in ["1", "null", "\"\"", " {} ", deep.as_str()] {
        runs.enqueue(&NewRun::default(), text, NOW).unwrap();
    }
}

#[test]
fn names_of_runs_and_workers_are_checked_where_they_come_in() {
    for bad in ["", "a\nb", &"x".repeat(37), "6F9619FF-8B86-D011-B42D-00CF4FC964FF", "6f9619ff8b86d011b42d00cf4fc964ff"]
    {
        assert_eq!(bad.parse::<RunId>(), Err(InvalidRun::Id), "{bad}");
    }
    for good in ["e2e-approval-0001", "6f9619ff-8b86-d011-b42d-00cf4fc964ff"] {
        assert_eq!(good.parse::<RunId>().unwrap().as_str(), good);
    }
    assert_eq!("".parse::<Worker>(), Err(InvalidRun::Worker));
    assert_eq!("x".repeat(65).parse::<Worker>(), Err(InvalidRun::Worker));
}

#[test]
fn claim_moves_queued_to_running_and_keeps_both_states() {
    moves_only_from(&[Status::Queued], Some(Status::Running), |runs, id| runs.claim(id, &lease("me"), NOW + 5));
    let shop = Shop::new();
    let runs = everywhere(&shop);
    assert_eq!(runs.claim(&id("queued"), &lease("me"), NOW + 5).unwrap(), Answer::Moved);
    let run = runs.find(&id("queued")).unwrap().unwrap();
    assert_eq!((run.claimed_by.as_str(), run.lease_expires, run.started_at), ("me", NOW + 900, NOW + 5));
    assert_eq!(opened(run.queued_request(&runs)).as_deref(), Some(REQUEST));
    assert_eq!(runs.claim(&id("queued"), &lease("you"), NOW).unwrap(), Answer::InState(Status::Running));
    assert_eq!(runs.requeue(&id("queued"), &worker("me"), NOW + 6).unwrap(), Answer::Moved);
    assert_eq!(runs.claim(&id("queued"), &lease("you"), NOW + 7).unwrap(), Answer::Moved);
    assert_eq!(runs.find(&id("queued")).unwrap().unwrap().started_at, NOW + 5);
}

#[test]
fn suspend_moves_its_workers_running_run_to_waiting_with_a_sealed_state() {
    let approval = |runs: &AgentRuns, id: &RunId, worker: &Worker| runs.suspend_for_approval(id, worker, STATE, NOW);
    let input = |runs: &AgentRuns, id: &RunId, worker: &Worker| runs.suspend_for_input(id, worker, STATE, NOW);
    moves_only_from(&[Status::Running], Some(Status::WaitingForApproval), |runs, id| approval(runs, id, &worker("me")));
    moves_only_from(&[Status::Running], Some(Status::WaitingForInput), |runs, id| input(runs, id, &worker("me")));
    only_for_its_worker(approval);
    only_for_its_worker(input);
    let shop = Shop::new();
    let runs = everywhere(&shop);
    assert!(sealed(&shop, "waiting_for_input", "suspended_state"));
    let run = runs.find(&id("waiting_for_input")).unwrap().unwrap();
    assert_eq!((run.claimed_by.as_str(), run.lease_expires), ("", 0));
    assert_eq!(opened(run.suspended_state(&runs)).as_deref(), Some(STATE));
    assert_eq!(opened(run.queued_request(&runs)).as_deref(), Some(REQUEST));
}

#[test]
fn a_second_suspension_overwrites_the_first() {
    let shop = Shop::new();
    let runs = everywhere(&shop);
    let name = id("waiting_for_input");
    assert_eq!(runs.claim_for_resume(&name, Waiting::Input, &lease("me"), NOW).unwrap(), Answer::Moved);
    assert!(sealed(&shop, "waiting_for_input", "suspended_state"), "kept while running");
    assert_eq!(runs.suspend_for_approval(&name, &worker("me"), "[2]", NOW).unwrap(), Answer::Moved);
    let run = runs.find(&name).unwrap().unwrap();
    assert_eq!(opened(run.suspended_state(&runs)).as_deref(), Some("[2]"));
}

#[test]
fn claim_for_resume_moves_only_from_the_waiting_state_it_names_and_keeps_the_state() {
    for (waiting, status) in
        [(Waiting::Approval, Status::WaitingForApproval), (Waiting::Input, Status::WaitingForInput)]
    {
        moves_only_from(&[status], Some(Status::Running), |runs, id| {
            runs.claim_for_resume(id, waiting, &lease("me"), NOW)
        });
        let shop = Shop::new();
        let runs = everywhere(&shop);
        let before = shop.cell(status.name(), "suspended_state");
        assert_eq!(runs.claim_for_resume(&id(status.name()), waiting, &lease("me"), NOW).unwrap(), Answer::Moved);
        assert_eq!(shop.cell(status.name(), "suspended_state"), before);
    }
}

#[test]
fn only_its_worker_renews_a_lease_and_renewing_twice_is_no_refusal() {
    let renew = |runs: &AgentRuns, id: &RunId, worker: &Worker| {
        runs.renew_lease(id, &Lease { worker: worker.clone(), expires: NOW + 2000 }, NOW)
    };
    moves_only_from(&[Status::Running], None, |runs, id| renew(runs, id, &worker("me")));
    only_for_its_worker(renew);
    let shop = Shop::new();
    let runs = everywhere(&shop);
    for _ in 0..2 {
        assert_eq!(renew(&runs, &id("running"), &worker("me")).unwrap(), Answer::Moved);
    }
    assert_eq!(shop.cell("running", "lease_expires").unwrap(), (NOW + 2000).to_string());
}

#[test]
fn only_its_worker_marks_a_pending_effect() {
    let mark = |runs: &AgentRuns, id: &RunId, worker: &Worker| runs.mark_pending_effect(id, worker, true, NOW);
    moves_only_from(&[Status::Running], None, |runs, id| mark(runs, id, &worker("me")));
    only_for_its_worker(mark);
    let shop = Shop::new();
    let runs = everywhere(&shop);
    assert_eq!(mark(&runs, &id("running"), &worker("me")).unwrap(), Answer::Moved);
    assert!(runs.find(&id("running")).unwrap().unwrap().pending_effect);
    assert_eq!(runs.mark_pending_effect(&id("running"), &worker("me"), false, NOW).unwrap(), Answer::Moved);
    assert!(!runs.find(&id("running")).unwrap().unwrap().pending_effect);
}

#[test]
fn requeue_gives_a_run_back_with_its_request() {
    let requeue = |runs: &AgentRuns, id: &RunId, worker: &Worker| runs.requeue(id, worker, NOW);
    moves_only_from(&[Status::Running], Some(Status::Queued), |runs, id| requeue(runs, id, &worker("me")));
    only_for_its_worker(requeue);
    let shop = Shop::new();
    let runs = everywhere(&shop);
    assert_eq!(requeue(&runs, &id("running"), &worker("me")).unwrap(), Answer::Moved);
    let run = runs.find(&id("running")).unwrap().unwrap();
    assert_eq!((run.requeue_count, run.claimed_by.as_str(), run.lease_expires), (1, "", 0));
    assert_eq!(opened(run.queued_request(&runs)).as_deref(), Some(REQUEST));
}

#[test]
fn only_a_run_whose_lease_has_ended_is_stale() {
    let after = NOW + 901;
    moves_only_from(&[Status::Running], Some(Status::Queued), |runs, id| runs.requeue_stale(id, after));
    moves_only_from(&[Status::Running], Some(Status::Failed), |runs, id| runs.dead_letter_stale(id, "lost", after));
    let shop = Shop::new();
    let runs = everywhere(&shop);
    let without = Lease { worker: worker("me"), expires: 0 };
    runs.start(&new("no lease"), &without, NOW).unwrap();
    for (name, now) in [("running", NOW + 899), ("running", NOW + 900), ("no lease", after)] {
        let before = shop.whole(name);
        assert_eq!(runs.requeue_stale(&id(name), now).unwrap(), Answer::NotStale, "{name} {now}");
        assert_eq!(runs.dead_letter_stale(&id(name), "lost", now).unwrap(), Answer::NotStale, "{name} {now}");
        assert_eq!(shop.whole(name), before);
        assert!(runs.stale(now).unwrap().iter().all(|stale| stale.uuid != name));
    }
    let stale = runs.stale(after).unwrap();
    assert_eq!(stale.len(), 1);
    assert_eq!((stale[0].uuid.as_str(), stale[0].claimed_by.as_str(), stale[0].requeue_count), ("running", "me", 0));
    assert_eq!(runs.requeue_stale(&id("running"), after).unwrap(), Answer::Moved);
    assert!(sealed(&shop, "running", "queued_request"));
    assert_eq!(shop.cell("running", "requeue_count").unwrap(), "1");
}

#[test]
fn a_dead_letter_empties_both_states() {
    let shop = Shop::new();
    let runs = everywhere(&shop);
    assert_eq!(runs.dead_letter_stale(&id("running"), "lost", NOW + 901).unwrap(), Answer::Moved);
    assert_eq!(shop.cell("running", "queued_request").as_deref(), Some(""));
    assert_eq!(shop.cell("running", "suspended_state").as_deref(), Some(""));
    assert_eq!(shop.cell("running", "termination_reason").as_deref(), Some("lost"));
}

#[test]
fn finish_ends_an_unfinished_run_and_empties_both_states() {
    for (settled, status) in [(Settled::Completed, Status::Completed), (Settled::Failed, Status::Failed)] {
        moves_only_from(&Status::UNFINISHED, Some(status), |runs, id| {
            runs.finish(id, None, &outcome(settled), NOW + 9)
        });
    }
    only_for_its_worker(|runs, id, worker| runs.finish(id, Some(worker), &outcome(Settled::Failed), NOW));
    let shop = Shop::new();
    let runs = everywhere(&shop);
    let before = shop.whole("queued");
    let nobodys = runs.finish(&id("queued"), Some(&worker("me")), &outcome(Settled::Failed), NOW).unwrap();
    assert_eq!((nobodys, shop.whole("queued")), (Answer::NotYours, before));
    assert_eq!(
        runs.finish(&id("running"), Some(&worker("me")), &outcome(Settled::Failed), NOW + 9).unwrap(),
        Answer::Moved
    );
    let run = runs.find(&id("running")).unwrap().unwrap();
    assert_eq!((run.finished_at, run.claimed_by.as_str(), run.lease_expires), (NOW + 9, "", 0));
    assert_eq!((run.error_class.chars().count(), run.termination_reason.as_str()), (255, "done"));
    assert_eq!(run.totals, outcome(Settled::Failed).totals);
    assert_eq!(shop.cell("running", "queued_request").as_deref(), Some(""));
    assert_eq!(shop.cell("running", "suspended_state").as_deref(), Some(""));
    assert_eq!((opened(run.queued_request(&runs)), opened(run.suspended_state(&runs))), (None, None));
}

#[test]
fn cancel_ends_any_unfinished_run_whoever_has_it() {
    moves_only_from(&Status::UNFINISHED, Some(Status::Cancelled), |runs, id| runs.cancel(id, "user", NOW));
    let shop = Shop::new();
    let runs = everywhere(&shop);
    assert_eq!(runs.cancel(&id("waiting_for_input"), "user", NOW).unwrap(), Answer::Moved);
    assert_eq!(shop.cell("waiting_for_input", "queued_request").as_deref(), Some(""));
    assert_eq!(shop.cell("waiting_for_input", "suspended_state").as_deref(), Some(""));
}

#[test]
fn a_status_from_elsewhere_is_an_error_and_the_run_stays_as_it_is() {
    let shop = Shop::new();
    let runs = everywhere(&shop);
    shop.sql("UPDATE tx_nrllm_agentrun SET status = 'paused' WHERE uuid = 'queued'");
    let before = shop.whole("queued");
    assert!(matches!(runs.status(&id("queued")), Err(Error::UnknownStatus(_))));
    assert!(matches!(runs.cancel(&id("queued"), "user", NOW), Err(Error::UnknownStatus(_))));
    assert!(matches!(shop.persister().take(&id("queued"), &lease("me"), NOW), Err(Error::UnknownStatus(_))));
    assert_eq!(shop.whole("queued"), before);
}

#[test]
fn o2_a_value_moved_to_another_run_or_column_does_not_open() {
    let shop = Shop::new();
    let runs = everywhere(&shop);
    shop.sql(
        "UPDATE tx_nrllm_agentrun SET queued_request = (SELECT queued_request FROM tx_nrllm_agentrun WHERE uuid \
        = 'running'), \
         suspended_state = queued_request WHERE uuid = 'queued'",
    );
    let run = runs.find(&id("queued")).unwrap().unwrap();
    assert!(matches!(run.queued_request(&runs), Err(Error::Codec(codec::Error::Rejected))));
    assert!(matches!(run.suspended_state(&runs), Err(Error::Codec(codec::Error::Rejected))));
}

#[test]
fn o1_cleartext_from_a_database_writer_is_refused_once_the_window_is_closed() {
    let shop = Shop::new();
    everywhere(&shop);
    shop.sql("UPDATE tx_nrllm_agentrun SET queued_request = '{\"admin\":true}' WHERE uuid = 'queued'");
    let open = shop.runs();
    let run = open.find(&id("queued")).unwrap().unwrap();
    assert_eq!(opened(run.queued_request(&open)).as_deref(), Some("{\"admin\":true}"));
    let columns = nr_llm().into_iter().map(|column| column.cleartext(hardwrap::column::Cleartext::Refuse)).collect();
    let closed = AgentRuns::new(shop.db.clone(), shop.codec.clone(), &Register::new(columns).unwrap()).unwrap();
    assert!(matches!(run.queued_request(&closed), Err(Error::Codec(codec::Error::Cleartext))));
}

fn unavailable<T: std::fmt::Debug>(result: Result<T, Error>) {
    let error = result.unwrap_err();
    assert!(matches!(error, Error::Codec(codec::Error::Unavailable(_))), "{error}");
}

#[test]
fn o11_an_unavailable_key_never_settles_clears_or_fails_a_run() {
    let shop = Shop::new();
    let runs = everywhere(&shop);
    let persister = shop.persister();
    let all = || Status::ALL.map(|status| shop.whole(status.name()));
    let before = all();
    shop.keys.set_unavailable(true);
    unavailable(persister.take(&id("queued"), &lease("you"), NOW));
    unavailable(persister.take_for_resume(&id("waiting_for_approval"), Waiting::Approval, &lease("you"), NOW));
    unavailable(persister.take_for_resume(&id("waiting_for_input"), Waiting::Input, &lease("you"), NOW));
    unavailable(persister.suspend(&id("running"), &worker("me"), Waiting::Input, STATE, NOW));
    unavailable(persister.enqueue(&new("another"), REQUEST, NOW));
    unavailable(runs.find(&id("queued")).unwrap().unwrap().queued_request(&runs));
    assert_eq!(all(), before);
    assert_eq!(shop.number("SELECT COUNT(*) FROM tx_nrllm_agentrun"), 7);
    shop.keys.set_unavailable(false);
    let Taken::Work(work) = persister.take(&id("queued"), &lease("you"), NOW).unwrap() else { panic!("not taken") };
    assert_eq!(work.opened.unwrap().expose(), REQUEST.as_bytes());
}

#[test]
fn o11_a_requeue_during_an_outage_keeps_what_is_needed_to_go_on() {
    let shop = Shop::new();
    let runs = everywhere(&shop);
    shop.keys.set_unavailable(true);
    assert_eq!(runs.requeue(&id("running"), &worker("me"), NOW).unwrap(), Answer::Moved);
    shop.keys.set_unavailable(false);
    let Taken::Work(work) = shop.persister().take(&id("running"), &lease("you"), NOW).unwrap() else {
        panic!("not taken")
    };
    assert_eq!(work.opened.unwrap().expose(), REQUEST.as_bytes());
}

#[test]
fn o11_gone_tampered_damaged_and_unavailable_are_told_apart() {
    let shop = Shop::new();
    let runs = everywhere(&shop);
    let persister = shop.persister();
    let take = |name: &str| persister.take(&id(name), &lease("me"), NOW);
    assert!(matches!(take("nobody").unwrap(), Taken::Refused(Answer::NoSuchRun)));
    assert!(matches!(take("completed").unwrap(), Taken::Refused(Answer::InState(Status::Completed))));
    let envelope = shop.cell("queued", "queued_request").unwrap();
    let stranger = envelope.replace(support::KID, "00ff020304050607");
    type Expected = fn(&codec::Error) -> bool;
    let cases: [(String, Expected); 3] = [
        ("hw1:damaged".into(), |error| matches!(error, codec::Error::Malformed(_))),
        (stranger, |error| matches!(error, codec::Error::UnknownKey(_))),
        (shop.cell("running", "queued_request").unwrap(), |error| matches!(error, codec::Error::Rejected)),
    ];
    for (stored, expected) in cases {
        shop.sql(&format!("UPDATE tx_nrllm_agentrun SET queued_request = '{stored}' WHERE uuid = 'queued'"));
        let before = shop.whole("queued");
        let Err(Error::Codec(error)) = take("queued") else { panic!("opened {stored}") };
        assert!(expected(&error), "{error}");
        assert_eq!(shop.whole("queued"), before);
    }
    assert_eq!(runs.status(&id("queued")).unwrap(), Some(Status::Queued));
}

#[test]
fn o12_one_unreadable_run_hides_no_other() {
    let shop = Shop::new();
    let runs = everywhere(&shop);
    shop.sql(
        "INSERT INTO tx_nrllm_agentrun (uuid, status, suspended_state, crdate, lease_expires, be_user, \
        claimed_by, error_class) VALUES \
         ('damaged', 'waiting_for_input', 'hw1:damaged', 1, 'soon', 'nobody', x'ff', CAST(x'fe' AS TEXT)), \
         (CAST(x'ff' AS TEXT), 'waiting_for_approval', CAST(x'ff' AS TEXT), 2, 0, 0, '', ''), \
         (x'41', 'waiting_for_approval', x'4142', 3, 0, 0, '', '')",
    );
    shop.keys.set_unavailable(true);
    let waiting = runs.waiting().unwrap();
    assert_eq!(waiting.len(), 5);
    shop.keys.set_unavailable(false);
    let answers: Vec<_> = waiting.iter().map(|run: &Run| run.suspended_state(&runs).is_ok()).collect();
    assert_eq!(answers, [false, false, false, true, true]);
    assert_eq!(waiting[1].uuid, "\u{fffd}");
    assert_eq!(runs.queued().unwrap().len(), 1);
    assert_eq!(runs.in_status(Status::Failed).unwrap().len(), 1);
    shop.sql("UPDATE tx_nrllm_agentrun SET status = 'running', lease_expires = 5 WHERE uuid = 'damaged'");
    assert_eq!(runs.stale(NOW).unwrap().len(), 1);
}

#[test]
fn o13_a_run_is_cancelled_without_its_key_or_a_readable_value() {
    let shop = Shop::new();
    let runs = everywhere(&shop);
    shop.keys.set_unavailable(true);
    shop.sql("UPDATE tx_nrllm_agentrun SET queued_request = CAST(x'ff' AS TEXT), suspended_state = 'hw1:damaged'");
    for status in Status::UNFINISHED {
        assert_eq!(runs.cancel(&id(status.name()), "user", NOW).unwrap(), Answer::Moved);
        assert_eq!(shop.cell(status.name(), "suspended_state").as_deref(), Some(""));
    }
}

#[test]
fn o14_the_status_is_known_without_key_or_payload() {
    let shop = Shop::new();
    let runs = everywhere(&shop);
    shop.keys.set_unavailable(true);
    shop.sql("UPDATE tx_nrllm_agentrun SET queued_request = zeroblob(50000000) WHERE uuid = 'queued'");
    for status in Status::ALL {
        assert_eq!(runs.status(&id(status.name())).unwrap(), Some(status));
    }
    assert_eq!(runs.status(&id("nobody")).unwrap(), None);
}

#[test]
fn o15_both_states_stay_while_running_and_go_when_the_run_ends() {
    let shop = Shop::new();
    let runs = everywhere(&shop);
    let name = id("waiting_for_approval");
    assert_eq!(runs.claim_for_resume(&name, Waiting::Approval, &lease("me"), NOW).unwrap(), Answer::Moved);
    assert!(sealed(&shop, name.as_str(), "queued_request") && sealed(&shop, name.as_str(), "suspended_state"));
    assert_eq!(runs.requeue(&name, &worker("me"), NOW).unwrap(), Answer::Moved);
    assert!(sealed(&shop, name.as_str(), "queued_request") && sealed(&shop, name.as_str(), "suspended_state"));
    assert_eq!(runs.cancel(&name, "user", NOW).unwrap(), Answer::Moved);
    assert_eq!(
        shop.number(
            "SELECT COUNT(*) FROM tx_nrllm_agentrun WHERE status = 'cancelled' AND \
         queued_request || suspended_state = ''"
        ),
        2
    );
}

#[test]
fn a_state_exchanged_between_opening_and_claiming_is_not_taken() {
    let shop: &'static Shop = Box::leak(Box::new(Shop::new()));
    let runs = everywhere(shop);
    // The writer comes when the key is asked, behind the read and before the claim.
    struct Meddling(&'static Shop, &'static str);
    impl hardwrap::provider::KeyProvider for Meddling {
        fn current(&self) -> Result<hardwrap::provider::MasterKey, hardwrap::provider::ProviderError> {
            self.0.keys.current()
        }
        fn wrap(
            &self,
            key: hardwrap::provider::KeyId,
            dek: &hardwrap::secret::Dek,
            aad: &hardwrap::provider::Aad,
        ) -> Result<hardwrap::provider::WrappedDek, hardwrap::provider::ProviderError> {
            self.0.keys.wrap(key, dek, aad)
        }
        fn unwrap(
            &self,
            wrapped: &hardwrap::provider::WrappedDek,
            aad: &hardwrap::provider::Aad,
        ) -> Result<hardwrap::secret::Dek, hardwrap::provider::ProviderError> {
            self.0.sql(self.1);
            self.0.keys.unwrap(wrapped, aad)
        }
    }
    let meddled_with = |sql| {
        let codec = codec::Codec::new(std::sync::Arc::new(Meddling(shop, sql)));
        let register = Register::new(nr_llm()).unwrap();
        hardwrap::store::Persister::new(AgentRuns::new(shop.db.clone(), codec, &register).unwrap())
    };
    let persister =
        meddled_with("UPDATE tx_nrllm_agentrun SET queued_request = queued_request || 'A' WHERE uuid = 'queued'");
    assert!(matches!(persister.take(&id("queued"), &lease("me"), NOW).unwrap(), Taken::Refused(Answer::Changed)));
    let persister =
        meddled_with("UPDATE tx_nrllm_agentrun SET suspended_state = NULL WHERE uuid = 'waiting_for_input'");
    let resumed = persister.take_for_resume(&id("waiting_for_input"), Waiting::Input, &lease("me"), NOW).unwrap();
    assert!(matches!(resumed, Taken::Refused(Answer::Changed)));
    assert_eq!(runs.status(&id("queued")).unwrap(), Some(Status::Queued));
    assert_eq!(runs.status(&id("waiting_for_input")).unwrap(), Some(Status::WaitingForInput));
    std::fs::remove_dir_all(shop.dir.path()).unwrap();
}

#[test]
fn a_taken_run_carries_what_was_opened_and_stands_as_claimed() {
    let shop = Shop::new();
    let runs = everywhere(&shop);
    let persister = shop.persister();
    let taken = persister.take_for_resume(&id("waiting_for_approval"), Waiting::Approval, &lease("you"), NOW).unwrap();
    let Taken::Work(work) = taken else { panic!("not taken") };
    assert_eq!(work.opened.unwrap().expose(), STATE.as_bytes());
    assert_eq!(opened(work.run.queued_request(persister.runs())).as_deref(), Some(REQUEST));
    let stored = runs.find(&id("waiting_for_approval")).unwrap().unwrap();
    assert_eq!(
        (work.run.status, &work.run.claimed_by, work.run.lease_expires, work.run.started_at),
        (stored.status, &stored.claimed_by, stored.lease_expires, stored.started_at)
    );
    shop.sql("UPDATE tx_nrllm_agentrun SET queued_request = NULL WHERE uuid = 'queued'");
    let Taken::Work(work) = persister.take(&id("queued"), &lease("me"), NOW).unwrap() else { panic!("not taken") };
    assert!(work.opened.is_none());
}

#[test]
fn two_workers_never_take_one_run() {
    let shop = Shop::new();
    let runs = shop.runs();
    let names: Vec<_> = (0..40).map(|_| runs.enqueue(&NewRun::default(), REQUEST, NOW).unwrap()).collect();
    let taken: usize = std::thread::scope(|scope| {
        let work = |name: &'static str| {
            let db = std::sync::Arc::new(hardwrap::store::Db::open(&support::url(&shop.dir)).unwrap());
            let runs = AgentRuns::new(db, shop.codec.clone(), &Register::new(nr_llm()).unwrap()).unwrap();
            let persister = hardwrap::store::Persister::new(runs);
            let names = &names;
            scope.spawn(move || {
                let took = |id: &&RunId| matches!(persister.take(id, &lease(name), NOW).unwrap(), Taken::Work(_));
                names.iter().filter(took).count()
            })
        };
        let threads = [work("one"), work("two"), work("three")];
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert_eq!(taken, 40);
}

#[test]
fn agent_runs_want_both_columns_registered_bound_and_there() {
    let shop = Shop::new();
    let make = |columns| AgentRuns::new(shop.db.clone(), shop.codec.clone(), &Register::new(columns).unwrap());
    assert!(matches!(make(nr_llm()[..1].to_vec()), Err(Error::Unregistered(_))));
    let unbound = Column::new("tx_nrllm_agentrun", "suspended_state", "uid", "x").unwrap();
    assert!(matches!(make(vec![nr_llm().remove(0), unbound]), Err(Error::NotBoundToUuid(_))));
    shop.sql("DROP TABLE tx_nrllm_agentrun");
    assert!(matches!(make(nr_llm()), Err(Error::NoTable(_))));
}

const DAY: i64 = 86_400;

/// Runs of each status made so many days ago, each with two events.
fn aged(shop: &Shop, days: i64) {
    for status in Status::ALL {
        let name = format!("{}-{days}", status.name());
        shop.sql(&format!(
            "INSERT INTO tx_nrllm_agentrun (uuid, status, crdate) VALUES ('{name}', '{}', {}); \
             INSERT INTO tx_nrllm_agentrun_event (run) SELECT uid FROM tx_nrllm_agentrun, (SELECT 1 UNION ALL \
                  SELECT 2) WHERE uuid = '{name}'",
            status.name(),
            NOW - days * DAY
        ));
    }
}

#[test]
fn purge_keeps_a_window_for_finished_runs_and_another_for_unfinished_ones() {
    let shop = Shop::new();
    let runs = shop.runs();
    for days in [1, 10, 30, 40] {
        aged(&shop, days);
    }
    assert_eq!(runs.purge(Retention::default(), NOW).unwrap(), Purged::default());
    let purged = runs.purge(Retention { finished: 5, unfinished: 35 }, NOW).unwrap();
    assert_eq!(purged, Purged { finished: 9, unfinished: 4, events: 26 });
    let purged = runs.purge(Retention { finished: 0, unfinished: 30 }, NOW).unwrap();
    assert_eq!(purged, Purged::default(), "30 days old is not older than 30 days");
    let purged = runs.purge(Retention { finished: 0, unfinished: 29 }, NOW).unwrap();
    assert_eq!(purged, Purged { finished: 0, unfinished: 4, events: 8 });
    assert_eq!(shop.number("SELECT COUNT(*) FROM tx_nrllm_agentrun"), 28 - 17);
    assert_eq!(shop.number("SELECT COUNT(*) FROM tx_nrllm_agentrun_event"), 2 * 11);
    assert_eq!(
        shop.number(
            "SELECT COUNT(*) FROM tx_nrllm_agentrun_event WHERE run NOT IN (SELECT uid FROM tx_nrllm_agentrun)"
        ),
        0
    );
}

#[test]
fn purge_never_deletes_a_run_under_a_live_lease() {
    let shop = Shop::new();
    let runs = shop.runs();
    aged(&shop, 100);
    shop.sql(&format!("UPDATE tx_nrllm_agentrun SET lease_expires = {} WHERE status = 'running'", NOW + 1));
    let purged = runs.purge(Retention { finished: 1, unfinished: 1 }, NOW).unwrap();
    assert_eq!((purged.finished, purged.unfinished), (3, 3));
    assert_eq!(runs.purge(Retention { finished: 1, unfinished: 1 }, NOW + 1).unwrap(), Purged::default());
    assert_eq!(runs.status(&id("running-100")).unwrap(), Some(Status::Running));
    assert_eq!(shop.number("SELECT COUNT(*) FROM tx_nrllm_agentrun_event"), 2);
    assert_eq!(runs.purge(Retention { finished: 1, unfinished: 1 }, NOW + 2).unwrap().unfinished, 1);
}

#[test]
fn purge_spares_a_live_lease_whatever_the_status_says() {
    let shop = Shop::new();
    let runs = shop.runs();
    aged(&shop, 100);
    shop.sql(&format!(
        "UPDATE tx_nrllm_agentrun SET lease_expires = {NOW}; \
         UPDATE tx_nrllm_agentrun SET status = 'paused' WHERE status = 'queued'"
    ));
    let both = Retention { finished: 1, unfinished: 1 };
    assert_eq!(runs.purge(both, NOW).unwrap(), Purged::default());
    assert_eq!(shop.number("SELECT COUNT(*) FROM tx_nrllm_agentrun_event"), 14);
    assert_eq!(runs.purge(both, NOW + 1).unwrap(), Purged { finished: 3, unfinished: 4, events: 14 });
}

#[test]
fn a_run_is_its_workers_alone_also_where_columns_ignore_case() {
    let shop = Shop::new();
    shop.sql(
        "DROP TABLE tx_nrllm_agentrun; CREATE TABLE TX_nrllm_agentrun (uid INTEGER PRIMARY KEY, pid int, uuid \
         varchar(36) COLLATE NOCASE, status varchar(32) COLLATE NOCASE, configuration_uid int, \
         configuration_identifier TEXT, be_user int, iterations int, truncated int, total_prompt_tokens int, \
         total_completion_tokens int, total_tokens int, estimated_cost decimal(10,6), error_class TEXT, \
         termination_reason TEXT, suspended_state mediumtext, queued_request mediumtext, claimed_by TEXT COLLATE \
         NOCASE, lease_expires int, requeue_count int, pending_effect int, started_at int DEFAULT 0, \
         finished_at int, tstamp int, crdate int)",
    );
    let runs = shop.runs();
    runs.start(&new("run"), &lease("me"), NOW).unwrap();
    runs.start(&new("RUN"), &lease("me"), NOW).unwrap();
    assert_eq!(runs.requeue(&id("run"), &worker("ME"), NOW).unwrap(), Answer::NotYours);
    assert_eq!(runs.requeue(&id("run"), &worker("me"), NOW).unwrap(), Answer::Moved);
    assert_eq!(runs.status(&id("RUN")).unwrap(), Some(Status::Running));
    assert_eq!(runs.find(&id("RUN")).unwrap().unwrap().uuid, "RUN");
}

#[test]
fn purge_goes_through_more_runs_than_one_chunk_holds() {
    let shop = Shop::new();
    shop.sql(
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 1234) \
         INSERT INTO tx_nrllm_agentrun (uuid, status, crdate) SELECT 'run ' || i, 'completed', 1 FROM n",
    );
    let purged = shop.runs().purge(Retention { finished: u32::MAX, unfinished: 1 }, NOW).unwrap();
    assert_eq!(purged, Purged::default(), "a window longer than time itself deletes nothing");
    let purged = shop.runs().purge(Retention { finished: 1, unfinished: 0 }, NOW).unwrap();
    assert_eq!(purged.finished, 1234);
}

#[test]
fn the_ancestors_seed_is_loaded_sealed_and_read_back_equal() {
    let seed = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/data/agentrun-seed.sql");
    let Ok(sql) = std::fs::read_to_string(&seed) else {
        println!("skipped: {} is not there", seed.display());
        return;
    };
    let shop = Shop::new();
    shop.sql(&sql);
    shop.sql(&sql); // it says of itself that it may be run again
    let runs = shop.runs();
    let names = ["e2e-approval-0001", "e2e-input-0001"];
    let cleartext = names.map(|name| shop.cell(name, "suspended_state").unwrap());
    let column = Register::new(nr_llm()).unwrap().find("tx_nrllm_agentrun.suspended_state").unwrap().clone();
    assert_eq!(shop.db.count(&column).unwrap().cleartext, 2);
    for stored in shop.db.page(&column, None, 10).unwrap() {
        assert_eq!(shop.db.seal_cleartext(&shop.codec, &column, &stored.key).unwrap(), SealedInPlace::Sealed);
    }
    let counts = shop.db.count(&column).unwrap();
    assert_eq!((counts.cleartext, counts.sealed_total()), (0, 2));
    for (name, cleartext) in names.iter().zip(cleartext) {
        assert!(sealed(&shop, name, "suspended_state"));
        assert_eq!(opened(runs.find(&id(name)).unwrap().unwrap().suspended_state(&runs)), Some(cleartext));
    }
    let taken = shop.persister().take_for_resume(&id(names[0]), Waiting::Approval, &lease("me"), NOW).unwrap();
    assert!(matches!(taken, Taken::Work(_)));
}
