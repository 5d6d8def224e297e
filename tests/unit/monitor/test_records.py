"""Records are kept until they are fetched, and can be fetched twice."""

import logging

import pytest

from coati.monitor.records import READ_KEPT, RecordLog, WarningRecorder, WarningsFile


def log_of(count, **kwargs):
    log = RecordLog(**kwargs)
    for number in range(count):
        log.append({"n": number})
    return log


def numbers(page):
    return [record["n"] for record in page.records]


def test_a_cursor_selects_later_records():
    log = log_of(3)
    page = log.since(0)
    assert (numbers(page), page.cursor) == ([0, 1, 2], 3)
    assert (numbers(log.since(3)), log.since(3).cursor) == ([], 3)
    log.append({"n": 3})
    assert (numbers(log.since(3)), log.since(3).cursor) == ([3], 4)


def test_a_lost_reply_can_be_fetched_again():
    log = log_of(3)
    assert log.since(1) == log.since(1)
    assert numbers(log.since(1)) == [1, 2]


def test_a_full_log_drops_the_oldest_records_and_repeats_none():
    log = log_of(5, capacity=2)
    assert (numbers(log.since(0)), log.since(0).cursor) == ([3, 4], 5)
    assert numbers(log.since(4)) == [4]
    assert numbers(log.since(5)) == []


def test_records_that_were_read_are_dropped_except_the_newest():
    log = log_of(READ_KEPT + 5)
    assert len(log.since(3).records) == READ_KEPT + 2
    assert len(log.since(0).records) == READ_KEPT + 5
    log.since(READ_KEPT + 4)
    assert numbers(log.since(0)) == list(range(4, READ_KEPT + 5))


def test_a_cursor_of_an_earlier_log_selects_all_records_of_the_new_one():
    # The actor was restarted: its log has 2 records, but the reader's cursor is 10, from the old log.
    page = log_of(2).since(10)
    assert (numbers(page), page.cursor) == ([0, 1], 2)


def test_later_records_do_not_change_a_page():
    log = log_of(1)
    page = log.since(0)
    log.append({"n": 1})
    assert numbers(page) == [0]


@pytest.fixture
def logger_of_an_actor():
    logger = logging.getLogger("coati.a_test_of_warnings")
    logger.propagate = False
    yield logger
    logger.handlers.clear()


def test_warnings_are_recorded(logger_of_an_actor):
    records = RecordLog()
    logger_of_an_actor.addHandler(WarningRecorder(records))
    logger_of_an_actor.warning("waited %s s for %s", 10, "weights")
    logger_of_an_actor.error("lost a batch")
    logger_of_an_actor.info("all is well")
    waited, lost = records.since(0).records
    assert (waited["warning"], lost["warning"]) == ("waited 10 s for weights", "lost a batch")
    assert waited["kind"] != lost["kind"]


def test_repeated_warnings_are_all_written_but_only_some_are_shown(tmp_path, caplog):
    logger, path = logging.getLogger("coati.a_test_of_many_warnings"), tmp_path / "warnings.log"
    with WarningsFile(path):
        for number in range(100):
            logger.warning("no score for %r", f"text {number}")
        logger.warning("something else")
        for _ in range(5):
            logger.error("lost a batch")
    logger.warning("after the run")
    shown = [int(message.split()[4].strip("'")) for message in caplog.messages if "no score" in message]
    assert shown == [0, 1, 2, 9, 99]
    assert "100 of this kind" in caplog.text
    assert [len([one for one in caplog.messages if part in one]) for part in ("else", "lost", "after")] == [1, 5, 1]
    assert len(path.read_text().splitlines()) == 106


def test_warnings_are_shown_even_if_the_file_cannot_be_written(tmp_path, caplog):
    with WarningsFile(tmp_path / "no" / "such" / "folder"):
        logging.getLogger("coati.a_test_of_many_warnings").warning("all is well")
    assert caplog.messages == ["all is well"]
