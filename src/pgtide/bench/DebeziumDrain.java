import io.debezium.embedded.Connect;
import io.debezium.engine.DebeziumEngine;
import io.debezium.engine.RecordChangeEvent;
import io.debezium.engine.format.ChangeEventFormat;
import java.io.StringReader;
import java.util.List;
import java.util.Properties;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import org.apache.kafka.connect.source.SourceRecord;

/** Drains a slot through Debezium's embedded engine; prints the seconds from the first change to the last expected. */
public class DebeziumDrain {
    static long seen = 0, first = 0;

    public static void main(String[] arguments) throws Exception {
        long expected = Long.parseLong(arguments[0]);
        Properties settings = new Properties();
        settings.load(System.in);
        CountDownLatch done = new CountDownLatch(1);
        DebeziumEngine<RecordChangeEvent<SourceRecord>> engine = DebeziumEngine.create(ChangeEventFormat.of(Connect.class))
            .using(settings)
            .using((success, message, error) -> {
                if (!success) System.err.println(message);
                done.countDown();
            })
            .notifying((List<RecordChangeEvent<SourceRecord>> records,
                        DebeziumEngine.RecordCommitter<RecordChangeEvent<SourceRecord>> committer) -> {
                if (seen == 0) first = System.nanoTime();
                for (RecordChangeEvent<SourceRecord> record : records) committer.markProcessed(record);
                committer.markBatchFinished();
                seen += records.size();
                if (seen >= expected) done.countDown();
            })
            .build();
        ExecutorService thread = Executors.newSingleThreadExecutor();
        thread.execute(engine);
        done.await();
        if (seen < expected) System.exit(1);
        System.out.println((System.nanoTime() - first) / 1e9);
        System.out.flush();
        Runtime.getRuntime().halt(0);
    }
}
