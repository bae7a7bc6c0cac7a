// The search of the site runs in a web worker, which browsers do not start on file:// pages. There, this class runs the
// script of the worker in a hidden iframe instead, with the same interface.
class FrameWorker extends EventTarget {
  constructor(url) {
    super();
    this.frame = document.body.appendChild(document.createElement("iframe"));
    this.frame.hidden = true;
    const inside = this.frame.contentWindow;
    addEventListener("message", (event) => {
      if (event.source === inside) {
        const message = new MessageEvent("message", { data: event.data });
        this.dispatchEvent(message);
        this.onmessage?.(message);
      }
    });
    inside.document.open();
    inside.document.write(`<body>
      <script>
        postMessage = (data) => parent.postMessage(data, "*");
        importScripts = async (...urls) => {
          for (const url of urls) {
            const script = document.createElement("script");
            script.src = url;
            const loaded = new Promise((resolve) => { script.onload = resolve; });
            document.body.append(script);
            await loaded;
          }
        };
      <\/script>
      <script src="${url}"><\/script>
    </body>`);
    this.ready = new Promise((resolve) => inside.addEventListener("load", resolve)); // open() has removed listeners
    inside.document.close();
  }

  postMessage(data) {
    this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
  }

  terminate() {
    this.frame.remove();
  }
}

if (location.protocol === "file:") {
  window.Worker = FrameWorker;
}
